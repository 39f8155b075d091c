# Libraries from outside: each becomes a target fsdp_part_<name> when it is found.
#
# Only the room that needs a part links it (cmake/rooms.cmake), so the library builds without what
# only the program needs.

set(FSDP_PARTS "")

function(fsdp_report name found for version)
  set(mark "not found")
  if(found)
    set(mark "found ${version}")
  endif()
  string(SUBSTRING "${name}              " 0 12 column)
  message(STATUS "part ${column} ${mark} (${for})")
endfunction()

function(fsdp_part name for module)
  set(found FALSE)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(fsdp_pc_${name} QUIET IMPORTED_TARGET ${module})
    set(found ${fsdp_pc_${name}_FOUND})
  endif()
  if(found)
    add_library(fsdp_part_${name} INTERFACE)
    target_link_libraries(fsdp_part_${name} INTERFACE PkgConfig::fsdp_pc_${name})
  endif()
  fsdp_report(${name} "${found}" "${for}" "${fsdp_pc_${name}_VERSION}")
endfunction()

find_package(PkgConfig QUIET)
find_package(Threads REQUIRED)

if(FSDP_OPENMP)
  find_package(OpenMP QUIET COMPONENTS C)
  fsdp_report(OpenMP "${OpenMP_C_FOUND}" "compute threads" "${OpenMP_C_VERSION}")
else()
  message(STATUS "part OpenMP       turned off (compute threads)")
endif()

find_package(dnnl QUIET CONFIG)
if(dnnl_FOUND)
  add_library(fsdp_part_dnnl INTERFACE)
  target_link_libraries(fsdp_part_dnnl INTERFACE DNNL::dnnl)
endif()
fsdp_report(oneDNN "${dnnl_FOUND}" "matrix products" "${dnnl_VERSION}")

fsdp_part(jansson "JSON" jansson)
fsdp_part(libfyaml "YAML" libfyaml)
fsdp_part(pcre2 "tokenizers" libpcre2-8)
fsdp_part(utf8proc "tokenizers" libutf8proc)
fsdp_part(libdeflate "CRC32 of files" libdeflate)
fsdp_part(xxhash "hashes of checkpoints" libxxhash)
if(FSDP_BUILD_TESTS)
  fsdp_part(cmocka "unit tests" cmocka)
endif()
