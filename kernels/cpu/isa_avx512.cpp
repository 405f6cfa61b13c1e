#include "vec_avx512.h"
#include "attention.h"
#include "product.h"

const octavo::Isa octavo::isa_avx512 = {norm, spread, quantise, embed, product, attend, rotate, remember, finite};
