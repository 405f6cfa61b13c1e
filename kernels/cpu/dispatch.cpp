// Which instruction sets this processor has.
#include "isa.h"

const octavo::Isa& octavo::isa_of(int level) {
#if defined(__x86_64__)
    if (level >= 2) return isa_avx512;
    if (level == 1) return isa_avx2;
#endif
    (void)level;
    return isa_plain;
}

OCT_API int32_t oct_isa_best(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        return 2;
    return 1;
#else
    return 0;
#endif
}
