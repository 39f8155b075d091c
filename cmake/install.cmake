# cmake --install: headers, libfsdp, the program, fsdp.pc and find_package(fsdp).

install(TARGETS libfsdp EXPORT fsdpTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fsdp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
if(TARGET fsdp)
  install(TARGETS fsdp RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(fsdp_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${fsdp_cmake_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fsdpConfig.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/fsdpConfig.cmake INSTALL_DESTINATION ${fsdp_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/fsdpConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/fsdpConfig.cmake
  ${PROJECT_BINARY_DIR}/cmake/fsdpConfigVersion.cmake DESTINATION ${fsdp_cmake_dir})

configure_file(${PROJECT_SOURCE_DIR}/cmake/fsdp.pc.in ${PROJECT_BINARY_DIR}/cmake/fsdp.pc.made @ONLY)
# The prefix is known when installing, not before: cmake --install --prefix may change it.
install(CODE "
  file(READ \"${PROJECT_BINARY_DIR}/cmake/fsdp.pc.made\" text)
  string(REPLACE \"<PREFIX>\" \"\${CMAKE_INSTALL_PREFIX}\" text \"\${text}\")
  file(WRITE \"${PROJECT_BINARY_DIR}/cmake/fsdp.pc\" \"\${text}\")")
install(FILES ${PROJECT_BINARY_DIR}/cmake/fsdp.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
