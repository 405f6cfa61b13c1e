#include "vec_avx512.h"
#include "attention.h"
#include "draw.h"
#include "product.h"

const octavo::Isa octavo::isa_avx512 {
    norm, add_rows, spread, quantise, embed, product, attend, merge, finish, rotate, remember, finite,
    draw,
};
