#include "vec_avx2.h"
#include "attention.h"
#include "product.h"

const octavo::Isa octavo::isa_avx2 = {norm, spread, quantise, embed, product, attend, rotate, remember, finite};
