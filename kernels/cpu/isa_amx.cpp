#include "vec_avx512.h"
#include "isa.h"

#if defined(__AMX_INT8__) || defined(OCTAVO_PLAIN_TILES)
#include "vec_amx.h"
#include "attention_tiles.h"
#include "tiled.h"
#include "prompt.h"

const octavo::Tiled octavo::tiled_amx {
    tiled_product, tiled_byte_products, attend_tiles, remember_pairs, halve, prompt_product,
};
#else  // a compiler that does not know AMX
const octavo::Tiled octavo::tiled_amx {};
#endif
