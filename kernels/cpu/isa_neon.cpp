#include "vec_neon.h"
#include "gate.h"
#include "latent.h"
#include "product.h"
#include "sample.h"

const octavo::Isa octavo::isa_neon {
    norm, add_rows, spread, quantise, embed, product, attend, merge, finish, rotate, remember, finite,
    attend_latent, remember_latent, byte_products, sample, likely, activate,
};
