/*
 * cpu.h - which instruction set the kernels use.
 *
 * Chosen once from what the processor offers; FSDP_ISA=plain|avx2|avx512|
 * avx512_bf16|amx lowers it, oneDNN's limit included, so that each can be
 * tested on the machine at hand. Asking for more than there is: an error.
 */
#ifndef FSDP_BASE_CPU_H
#define FSDP_BASE_CPU_H

#include "fsdp/status.h"

typedef enum fsdp__isa {
    FSDP__ISA_PLAIN,
    FSDP__ISA_AVX2, /* with FMA and F16C */
    FSDP__ISA_AVX512,
    FSDP__ISA_AVX512_BF16,
    FSDP__ISA_AMX
} fsdp__isa;

fsdp__isa fsdp__cpu_isa(void);         /* in force; first call reads the environment */
fsdp__isa fsdp__cpu_isa_machine(void); /* what the processor offers */
fsdp_status fsdp__cpu_check(void);     /* error if FSDP_ISA asks for the impossible */
const char *fsdp__cpu_isa_name(fsdp__isa isa);
const char *fsdp__cpu_model(void); /* from /proc/cpuinfo; "unknown" */

#endif
