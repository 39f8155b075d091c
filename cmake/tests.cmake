# Tests: one executable a C file, registered with CTest under its folder's label.
#
# unit/test_<room>_<subject>.c links that room and what it may use, the others link all rooms. A
# comment line "ctest: ..." in the file may hold: slow (left out by test.sh --quick), long (run by
# --long only), serial (nothing runs beside it), timeout=SECONDS.
#
# In a sanitizer build the tests have its name in front; the thread sanitizer's has those tests only
# that run ranks as threads: dist, and the units of comm and fsdp.

# Several tests run at once: threads that wait must not take the processors from those that compute
# (the tensor room's tests took three to six times as long).
set(fsdp_test_env "OMP_WAIT_POLICY=PASSIVE")
set(fsdp_test_prefix "")
set(fsdp_test_folders unit dist golden claims conformance fault)
set(fsdp_test_threads_only FALSE)
set(fsdp_conformance ${PROJECT_BINARY_DIR}/conformance)
if(FSDP_SANITIZE MATCHES "address")
  set(fsdp_test_prefix "asan.")
  list(APPEND fsdp_test_env
    "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:allocator_may_return_null=1"
    "UBSAN_OPTIONS=print_stacktrace=1")
elseif(FSDP_SANITIZE MATCHES "thread")
  set(fsdp_test_prefix "tsan.")
  set(fsdp_test_folders unit dist)
  set(fsdp_test_threads_only TRUE)
  # OpenMP's own pool is not instrumented: keep oneDNN from starting one.
  list(APPEND fsdp_test_env "TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp"
    "OMP_NUM_THREADS=1")
endif()

# Labels and limits of the test `name`, from the "ctest:" line of its source.
function(fsdp_test_properties name source folder)
  set(labels ${folder})
  set(timeout 120)
  file(STRINGS ${source} words REGEX "ctest:" LIMIT_COUNT 1)
  if(words MATCHES "ctest:.*slow")
    list(APPEND labels slow)
  endif()
  if(words MATCHES "ctest:.*long")
    list(APPEND labels long)
  endif()
  if(words MATCHES "ctest:.*serial")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
  if(words MATCHES "timeout=([0-9]+)")
    set(timeout ${CMAKE_MATCH_1})
  endif()
  if(FSDP_SANITIZE)
    math(EXPR timeout "${timeout} * 4")
  endif()
  if(ARGN)
    list(APPEND labels ${ARGN})
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout})
endfunction()

function(fsdp_c_test source folder)
  get_filename_component(name ${source} NAME_WE)
  set(links fsdp_all)
  set(room "")
  if(name MATCHES "^test_([a-z]+)")
    set(room ${CMAKE_MATCH_1})
    if(TARGET fsdp_${room} AND folder STREQUAL "unit")
      set(links fsdp_${room})
    elseif(folder STREQUAL "unit")
      message(STATUS "test ${name} is left out: no room ${room}")
      return()
    endif()
  endif()
  if(fsdp_test_threads_only AND folder STREQUAL "unit" AND NOT room MATCHES "^(comm|fsdp)$")
    return()
  endif()
  if(TARGET ${name})
    set(name ${folder}_${name})
  endif()
  add_executable(${name} ${source})
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/${folder})
  target_link_libraries(${name} PRIVATE ${links} fsdp_part_cmocka fsdp_flags)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE
    FSDP_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data" FSDP_PROGRAM="${PROJECT_BINARY_DIR}/fsdp")
  set(env ${fsdp_test_env})
  if(folder STREQUAL "conformance")
    list(APPEND env "FSDP_CONFORMANCE=${fsdp_conformance}")
  endif()
  add_test(NAME ${fsdp_test_prefix}${name} COMMAND ${CMAKE_COMMAND} -E env --unset=OMP_NUM_THREADS --unset=FSDP_ISA
    ${env} $<TARGET_FILE:${name}>)
  if(folder STREQUAL "conformance")
    set_tests_properties(${fsdp_test_prefix}${name} PROPERTIES
      FIXTURES_SETUP ${fsdp_test_prefix}conformance FIXTURES_REQUIRED ${fsdp_test_prefix}conformance_new)
  endif()
  set_tests_properties(${fsdp_test_prefix}${name} PROPERTIES SKIP_RETURN_CODE 77)
  fsdp_test_properties(${fsdp_test_prefix}${name} ${source} ${folder} ${room})
endfunction()

if(TARGET fsdp_part_cmocka)
  foreach(folder IN LISTS fsdp_test_folders)
    file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${folder}/*.c)
    foreach(source IN LISTS sources)
      fsdp_c_test(${source} ${folder})
    endforeach()
  endforeach()
else()
  message(WARNING "cmocka was not found: no tests in C are built (Debian: apt install libcmocka-dev)")
endif()

# The conformance tests record what they showed in a folder that is emptied first; the table of all
# rows is the last of them, and fails when a row that must run did not.
if(TARGET fsdp_part_cmocka AND "conformance" IN_LIST fsdp_test_folders)
  add_executable(conformance_table tests/conformance/table/conformance_table.c)
  target_link_libraries(conformance_table PRIVATE fsdp_flags)
  set_target_properties(conformance_table PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/conformance)
  add_test(NAME ${fsdp_test_prefix}conformance_new COMMAND ${CMAKE_COMMAND}
    -DFOLDER=${fsdp_conformance} -P ${PROJECT_SOURCE_DIR}/cmake/empty_folder.cmake)
  set_tests_properties(${fsdp_test_prefix}conformance_new PROPERTIES LABELS conformance
    FIXTURES_SETUP ${fsdp_test_prefix}conformance_new)
  add_test(NAME ${fsdp_test_prefix}conformance_table
    COMMAND conformance_table ${fsdp_conformance})
  set_tests_properties(${fsdp_test_prefix}conformance_table PROPERTIES LABELS "conformance;slow"
    FIXTURES_REQUIRED ${fsdp_test_prefix}conformance)
endif()

# Tests of the program, in bash, with FSDP naming it.
if(TARGET fsdp AND NOT fsdp_test_threads_only)
  file(GLOB scripts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/cli/*.sh)
  foreach(script IN LISTS scripts)
    get_filename_component(name ${script} NAME_WE)
    add_test(NAME ${fsdp_test_prefix}cli_${name} COMMAND ${CMAKE_COMMAND} -E env --unset=OMP_NUM_THREADS
      --unset=FSDP_ISA ${fsdp_test_env} FSDP=${PROJECT_BINARY_DIR}/fsdp
      FSDP_BUILD=${PROJECT_BINARY_DIR} FSDP_SOURCE=${PROJECT_SOURCE_DIR}
      FSDP_TEST_DATA=${PROJECT_SOURCE_DIR}/tests/data bash ${script})
    fsdp_test_properties(${fsdp_test_prefix}cli_${name} ${script} cli)
    set_tests_properties(${fsdp_test_prefix}cli_${name} PROPERTIES SKIP_RETURN_CODE 77)
  endforeach()
endif()

foreach(source IN LISTS fsdp_examples)
  if(fsdp_test_threads_only)
    continue()
  endif()
  get_filename_component(name ${source} NAME_WE)
  add_test(NAME ${fsdp_test_prefix}ex_${name} COMMAND ${CMAKE_COMMAND} -E env --unset=OMP_NUM_THREADS
    ${fsdp_test_env} $<TARGET_FILE:ex_${name}>)
  fsdp_test_properties(${fsdp_test_prefix}ex_${name} ${source} examples)
endforeach()

# What needs no sanitizer: each public header alone, as C17 and as C++17, and the source's checks.
if(NOT FSDP_SANITIZE)
  file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/fsdp/*.h)
  set(twins "")
  foreach(header IN LISTS headers)
    get_filename_component(name ${header} NAME_WE)
    foreach(suffix c cc)
      set(twin ${PROJECT_BINARY_DIR}/headers/${name}.${suffix})
      file(GENERATE OUTPUT ${twin}
        CONTENT "#include \"fsdp/${name}.h\"\n#include \"fsdp/${name}.h\"\n")
      list(APPEND twins ${twin})
    endforeach()
  endforeach()
  add_library(header_check OBJECT ${twins})
  target_link_libraries(header_check PRIVATE libfsdp fsdp_flags)

  foreach(check layers sizes format)
    add_test(NAME check_${check} COMMAND sh ${PROJECT_SOURCE_DIR}/tools/check_${check}
      ${PROJECT_SOURCE_DIR})
    set_tests_properties(check_${check} PROPERTIES LABELS source TIMEOUT 60)
  endforeach()
endif()
