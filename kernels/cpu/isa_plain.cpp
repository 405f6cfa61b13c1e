#include "vec_plain.h"
#include "attention.h"
#include "product.h"
#include "sample.h"

const octavo::Isa octavo::isa_plain {
    norm, add_rows, spread, quantise, embed, product, attend, merge, finish, rotate, remember, finite,
    sample, likely,
};
