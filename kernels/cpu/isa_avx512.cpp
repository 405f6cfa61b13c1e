#include "vec_avx512.h"
#include "attention.h"
#include "product.h"
#include "sample.h"

const octavo::Isa octavo::isa_avx512 {
    norm, add_rows, spread, quantise, embed, product, attend, merge, finish, rotate, remember, finite,
    sample, likely,
};
