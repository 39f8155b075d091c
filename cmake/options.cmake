# Options, build types and the flags that all code shares.

option(FSDP_WERROR "Treat warnings as errors" ON)
option(FSDP_OPENMP "Use OpenMP for the compute threads" ON)
option(FSDP_BUILD_PROGRAM "Build the program fsdp" ON)
option(FSDP_BUILD_TESTS "Build the tests" ON)
option(FSDP_BUILD_EXAMPLES "Build the examples" ON)
set(FSDP_ONLY_ROOMS "" CACHE STRING "Build these rooms alone (a list; empty: all)")
set(FSDP_SANITIZE "" CACHE STRING "Sanitizers: empty, \"address,undefined\" or \"thread\"")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Line tables in release too: a backtrace of a user's crash should name lines.
set(CMAKE_C_FLAGS_RELEASE "-O3 -g1 -DNDEBUG")
set(CMAKE_C_FLAGS_DEBUG "-O0 -g")
set(CMAKE_C_FLAGS_SANITIZE "-O1 -g1")

# Flags of every C file. No -march: kernels choose their instruction set at run time. The compiler
# may not contract a*b+c, or results would differ between instruction sets. The other two let it
# vectorise more and change no result.
add_library(fsdp_flags INTERFACE)
target_compile_definitions(fsdp_flags INTERFACE _GNU_SOURCE)
target_compile_options(fsdp_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-Wshadow;-Wstrict-prototypes;-Wmissing-prototypes>
  $<$<COMPILE_LANGUAGE:C>:-Wpointer-arith;-Wvla>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
  $<$<BOOL:${FSDP_WERROR}>:-Werror>
  -ffp-contract=off -fno-math-errno -fno-trapping-math)

if(FSDP_SANITIZE)
  set(fsdp_sanitize_flags -fsanitize=${FSDP_SANITIZE} -fno-omit-frame-pointer -g1)
  if(FSDP_SANITIZE MATCHES "undefined")
    list(APPEND fsdp_sanitize_flags -fno-sanitize-recover=all)
  endif()
  add_compile_options(${fsdp_sanitize_flags})
  # gcc before 14 aligns what it keeps of a returned function to 32 bytes: a vector of AVX-512 there
  # is a fault (its bug 110027). These files are the ones that hold such vectors.
  if(FSDP_SANITIZE MATCHES "address" AND CMAKE_C_COMPILER_ID STREQUAL "GNU" AND
     CMAKE_C_COMPILER_VERSION VERSION_LESS 14)
    file(GLOB fsdp_wide ${PROJECT_SOURCE_DIR}/src/tensor/kernel_fast_avx512*.c
      ${PROJECT_SOURCE_DIR}/src/tensor/kernel_*_tile.c ${PROJECT_SOURCE_DIR}/src/base/convert_block.c)
    set_source_files_properties(${fsdp_wide} PROPERTIES COMPILE_OPTIONS
      "--param=asan-use-after-return=0")
  endif()
  add_link_options(-fsanitize=${FSDP_SANITIZE})
endif()
