// Which instruction sets this processor has, and this process may use.
#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)
// AVX-512's level with what AMX has of its own. Made here, where nothing is compiled for a processor that may be absent.
octavo::Isa with_tiles() {
    octavo::Isa isa = octavo::isa_avx512;
    isa.product = octavo::tiled_amx.product;
    isa.byte_products = octavo::tiled_amx.byte_products;
    isa.attend = octavo::tiled_amx.attend;
    isa.remember = octavo::tiled_amx.remember;
    isa.tiles = true;
    isa.halve = octavo::tiled_amx.halve;
    isa.prompt_product = octavo::tiled_amx.prompt_product;
    return isa;
}

#if defined(OCTAVO_PLAIN_TILES)
bool tiles_allowed() { return true; }
#elif defined(__linux__)
// The system saves tile registers (XCR0 bits 17 and 18) only for processes that have asked it to: the state of a thread
// grows by 8 KB. Asked once, for all threads that are and will be; refused where a thread's signal stack is too small.
bool tiles_allowed() {
    constexpr unsigned AMX = 1u << 22 | 1u << 24 | 1u << 25, STATE = 3u << 17;  // bf16, tiles, int8
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX) != AMX) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a & STATE) == STATE && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#else
bool tiles_allowed() { return false; }
#endif

int best_level() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vnni"))
        return 1;
    return octavo::tiled_amx.product && tiles_allowed() ? 3 : 2;
}
#elif defined(__aarch64__) && defined(__linux__)
int best_level() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? 4 : 0; }
#elif defined(__aarch64__) && defined(__APPLE__)
int best_level() { return 4; }  // there is none without dot products
#else
int best_level() { return 0; }
#endif

}  // namespace

const octavo::Isa& octavo::isa_of(int level) {
#if defined(__x86_64__)
    static const Isa tiled = with_tiles();
    if (level >= 3) return tiled;
    if (level == 2) return isa_avx512;
    if (level == 1) return isa_avx2;
#elif defined(__aarch64__)
    if (level >= 4) return isa_neon;
#endif
    (void)level;
    return isa_plain;
}

OCT_API int32_t oct_isa_best(void) {
    static const int best = best_level();
    return best;
}
