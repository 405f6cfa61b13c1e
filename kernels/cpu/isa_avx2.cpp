#include "vec_avx2.h"
#include "attention.h"
#include "draw.h"
#include "product.h"

const octavo::Isa octavo::isa_avx2 {
    norm, add_rows, spread, quantise, embed, product, attend, merge, finish, rotate, remember, finite,
    draw,
};
