#include "vec_avx512.h"
#include "gate.h"
#include "latent.h"
#include "product.h"
#include "sample.h"
#include "wide.h"

const octavo::Isa octavo::isa_avx512 {
    norm, add_rows, spread, quantise, embed, product_of_any, attend, merge, finish, rotate, remember, finite,
    attend_latent, remember_latent, wide_byte_products, sample, likely, activate,
};
