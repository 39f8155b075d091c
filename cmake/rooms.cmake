# The rooms: one static library each, then libfsdp and the program out of them.
#
# src/LAYERS is the one truth about which room may use which. A room without sources is not there;
# a room whose parts are missing is left out, and so is what stands on it.

set(FSDP_LAYERS_FILE ${PROJECT_SOURCE_DIR}/src/LAYERS)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${FSDP_LAYERS_FILE})

# Parts that a room needs.
set(fsdp_needs_tensor dnnl)
set(fsdp_needs_format jansson libfyaml libdeflate)
set(fsdp_needs_data jansson pcre2 utf8proc xxhash)
set(fsdp_needs_ckpt jansson libdeflate xxhash)
set(fsdp_needs_hf jansson)
set(fsdp_needs_train jansson libfyaml)
set(fsdp_needs_cli jansson libfyaml)

# Rooms that serve the program alone.
set(fsdp_program_rooms train plan launch cli)

set(FSDP_ROOMS "")
set(fsdp_left_out "")

file(STRINGS ${FSDP_LAYERS_FILE} fsdp_lines REGEX "^[a-z]+:")
foreach(line IN LISTS fsdp_lines)
  string(REGEX MATCH "^[a-z]+" room "${line}")
  string(REGEX REPLACE "^[a-z]+: *" "" uses "${line}")
  string(REPLACE " " ";" uses "${uses}")
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${room}/*.c)
  if(NOT sources OR (FSDP_ONLY_ROOMS AND NOT room IN_LIST FSDP_ONLY_ROOMS))
    continue()
  endif()

  set(missing "")
  foreach(part IN LISTS fsdp_needs_${room})
    if(NOT TARGET fsdp_part_${part})
      list(APPEND missing ${part})
    endif()
  endforeach()
  foreach(used IN LISTS uses)
    if(used IN_LIST fsdp_left_out)
      list(APPEND missing "room ${used}")
    endif()
  endforeach()
  if(missing)
    list(JOIN missing ", " missing)
    if(room STREQUAL "tensor")
      message(FATAL_ERROR "room tensor needs oneDNN, which was not found; "
                          "install it (Debian: apt install libdnnl-dev) or set dnnl_DIR")
    endif()
    message(STATUS "room ${room} is left out: missing ${missing}")
    list(APPEND fsdp_left_out ${room})
    continue()
  endif()

  add_library(fsdp_${room} STATIC ${sources})
  set_target_properties(fsdp_${room} PROPERTIES
    POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
  target_include_directories(fsdp_${room} PUBLIC
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(fsdp_${room} PRIVATE FSDP_VERSION="${PROJECT_VERSION}")
  target_link_libraries(fsdp_${room} PUBLIC fsdp_flags)
  foreach(used IN LISTS uses)
    if(TARGET fsdp_${used})
      target_link_libraries(fsdp_${room} PUBLIC fsdp_${used})
    endif()
  endforeach()
  foreach(part IN LISTS fsdp_needs_${room})
    target_link_libraries(fsdp_${room} PUBLIC fsdp_part_${part})
  endforeach()
  list(APPEND FSDP_ROOMS ${room})
endforeach()

if(TARGET fsdp_base)
  target_link_libraries(fsdp_base PUBLIC Threads::Threads m)
  if(FSDP_OPENMP AND OpenMP_C_FOUND)
    target_link_libraries(fsdp_base PUBLIC OpenMP::OpenMP_C)
  endif()
endif()

# What tests and tools of no room in particular link.
add_library(fsdp_all INTERFACE)
foreach(room IN LISTS FSDP_ROOMS)
  target_link_libraries(fsdp_all INTERFACE fsdp_${room})
endforeach()

# libfsdp. The target is called libfsdp because the program's file is build/fsdp.
set(FSDP_LIBRARY_ROOMS ${FSDP_ROOMS})
list(REMOVE_ITEM FSDP_LIBRARY_ROOMS ${fsdp_program_rooms})
add_library(libfsdp SHARED)
add_library(fsdp::fsdp ALIAS libfsdp)
set_target_properties(libfsdp PROPERTIES
  OUTPUT_NAME fsdp EXPORT_NAME fsdp LINKER_LANGUAGE C
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_include_directories(libfsdp INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
# nodelete: threads that outlive a dlclose still run the destructor of their context.
target_link_options(libfsdp PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL -Wl,-z,nodelete)
if(FSDP_SANITIZE)
  # A sanitizer's run-time stands in the program, not in the library.
  target_link_options(libfsdp PRIVATE -Wl,-z,undefs)
endif()
foreach(room IN LISTS FSDP_LIBRARY_ROOMS)
  target_sources(libfsdp PRIVATE $<TARGET_OBJECTS:fsdp_${room}>)
  foreach(part IN LISTS fsdp_needs_${room})
    target_link_libraries(libfsdp PRIVATE fsdp_part_${part})
  endforeach()
endforeach()
target_link_libraries(libfsdp PRIVATE Threads::Threads m)
if(FSDP_OPENMP AND OpenMP_C_FOUND)
  target_link_libraries(libfsdp PRIVATE OpenMP::OpenMP_C)
endif()

# The program links the rooms themselves, so it starts without looking for libfsdp.
if(FSDP_BUILD_PROGRAM AND TARGET fsdp_cli)
  add_executable(fsdp $<TARGET_OBJECTS:fsdp_cli>)
  set_target_properties(fsdp PROPERTIES LINKER_LANGUAGE C RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  target_link_libraries(fsdp PRIVATE fsdp_all)
endif()

if(EXISTS ${PROJECT_SOURCE_DIR}/bench/CMakeLists.txt)
  add_subdirectory(bench)
endif()

if(FSDP_BUILD_EXAMPLES AND NOT FSDP_ONLY_ROOMS)
  file(GLOB fsdp_examples CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/*.c)
  foreach(source IN LISTS fsdp_examples)
    get_filename_component(name ${source} NAME_WE)
    add_executable(ex_${name} ${source})
    target_link_libraries(ex_${name} PRIVATE libfsdp fsdp_flags m)
    # The same source must be C++17.
    set(twin ${PROJECT_BINARY_DIR}/examples_cxx/${name}.cc)
    file(GENERATE OUTPUT ${twin} CONTENT "#include \"${source}\"\n")
    add_library(ex_${name}_cxx OBJECT ${twin})
    target_link_libraries(ex_${name}_cxx PRIVATE libfsdp fsdp_flags)
  endforeach()
endif()
