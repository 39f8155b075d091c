/*
 * cpu.c - what the processor offers, and what FSDP_ISA makes of it.
 *
 * The answer is found once a process: it is a fact about the machine and the
 * environment at the first call, the same for all contexts.
 */
#include "base/cpu.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "base/error.h"

static const char *const names[] = {"plain", "avx2", "avx512", "avx512_bf16", "amx"};
enum { NAMES = sizeof names / sizeof *names };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static fsdp__isa isa_machine, isa_used;
static int asked = -1;      /* index of FSDP_ISA's name; -1: not set */
static char asked_text[32]; /* what FSDP_ISA said */
static int asked_unknown;
static char model[128] = "unknown";

#if defined(__x86_64__)

/* Register state that the system saves: bits of XCR0. */
static uint64_t system_state(void)
{
    uint32_t a, d;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

/* AMX needs the kernel's consent for its tile registers, too. */
static int kernel_has_tiles(void)
{
    enum { ARCH_GET_XCOMP_SUPP_ = 0x1021 };
    uint64_t mask = 0;
    return syscall(SYS_arch_prctl, ARCH_GET_XCOMP_SUPP_, &mask) == 0 && (mask >> 18 & 1);
}

static fsdp__isa find_machine(void)
{
    unsigned a, b, c, d, c1, b7, d7, a71 = 0;
    if (!__get_cpuid(1, &a, &b, &c1, &d)) return FSDP__ISA_PLAIN;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d7)) return FSDP__ISA_PLAIN;
    if (a >= 1 && !__get_cpuid_count(7, 1, &a71, &b, &c, &d)) a71 = 0;
    unsigned need1 = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29; /* FMA, OSXSAVE, AVX, F16C */
    if ((c1 & need1) != need1 || !(b7 >> 5 & 1)) return FSDP__ISA_PLAIN;
    uint64_t state = system_state();
    if ((state & 0x6) != 0x6) return FSDP__ISA_PLAIN;
    unsigned need7 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    if ((b7 & need7) != need7 || (state & 0xe0) != 0xe0) return FSDP__ISA_AVX2;
    if (!(a71 >> 5 & 1)) return FSDP__ISA_AVX512;
    unsigned amx = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE */
    if ((d7 & amx) != amx || (state & 0x60000) != 0x60000 || !kernel_has_tiles())
        return FSDP__ISA_AVX512_BF16;
    return FSDP__ISA_AMX;
}

#else

static fsdp__isa find_machine(void)
{
    return FSDP__ISA_PLAIN;
}

#endif

static void find_model(void)
{
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f) return;
    char line[256];
    while (fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        colon += strspn(colon, ": \t");
        colon[strcspn(colon, "\n")] = 0;
        if (*colon) snprintf(model, sizeof model, "%.127s", colon);
        break;
    }
    fclose(f);
}

static void find(void)
{
    isa_machine = isa_used = find_machine();
    find_model();
    const char *env = getenv("FSDP_ISA");
    if (!env || !*env) return;
    snprintf(asked_text, sizeof asked_text, "%s", env);
    for (int i = 0; i < NAMES; i++)
        if (strcmp(env, names[i]) == 0) asked = i;
    asked_unknown = asked < 0;
    if (asked >= 0 && asked <= (int)isa_machine) isa_used = (fsdp__isa)asked;
}

fsdp__isa fsdp__cpu_isa(void)
{
    pthread_once(&once, find);
    return isa_used;
}

fsdp__isa fsdp__cpu_isa_machine(void)
{
    pthread_once(&once, find);
    return isa_machine;
}

fsdp_status fsdp__cpu_check(void)
{
    pthread_once(&once, find);
    if (asked_unknown)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "FSDP_ISA=%s is not an instruction set; expected plain, avx2, avx512, "
                          "avx512_bf16 or amx, or unset it",
                          asked_text);
    if (asked > (int)isa_machine)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "FSDP_ISA=%s: this processor (%s) offers %s at most; set FSDP_ISA=%s or "
                          "lower, or unset it",
                          asked_text, model, names[isa_machine], names[isa_machine]);
    return FSDP_OK;
}

const char *fsdp__cpu_isa_name(fsdp__isa isa)
{
    return isa >= 0 && (int)isa < NAMES ? names[isa] : "unknown";
}

const char *fsdp__cpu_model(void)
{
    pthread_once(&once, find);
    return model;
}
