#include "vec_plain.h"
#include "attention.h"
#include "product.h"

const octavo::Isa octavo::isa_plain = {norm, spread, quantise, embed, product, attend, rotate, remember, finite};
