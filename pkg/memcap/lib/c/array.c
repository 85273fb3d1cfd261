/* SPDX-License-Identifier: Apache-2.0 */

/* Arrays and mipmapped arrays. They are charged by their descriptions, with rows rounded up to 512
 * bytes. How much they really take depends on the GPU's tiling; the agent's reading of the driver
 * corrects that. Sparse arrays have no memory of their own. Nor have arrays whose memory the
 * program maps later. */

#include "charge.h"

/* line_bytes returns how many bytes a row of width elements takes. Some formats from 0x80 on are in
 * blocks of 4 by 4 (BC) or in planes. */
static uint64_t line_bytes(uint64_t width, int format, unsigned int channels)
{
    switch (format) {
    case 0x01: case 0x08: return width * channels;                                        /* 8 bits */
    case 0x02: case 0x09: case 0x10: return width * channels * 2;                         /* 16 bits, half */
    case 0xc0: case 0xc1: case 0xc2: case 0xc6: case 0xc7: case 0xc8: return width * channels; /* normalised, 8 bits */
    case 0xc3: case 0xc4: case 0xc5: case 0xc9: case 0xca: case 0xcb: return width * channels * 2;
    case 0x91: case 0x92: case 0x97: case 0x98: return (width + 1) / 2;                   /* BC1, BC4 */
    case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e: return width;
    case 0xb0: return (width * 3 + 1) / 2; /* NV12 */
    default: return width * channels * 4;
    }
}

static uint64_t part_bytes(const CUarray3 *d)
{
    uint64_t line, bytes;
    if (d->flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED))
        return 0;
    if (d->width >= MOST || d->channels > 16)
        return 0; /* there is no such array, and the driver will refuse it */
    line = round_up(line_bytes(d->width, d->format, d->channels), UNIT);
    if (__builtin_mul_overflow(line, d->height ? d->height : 1, &bytes) ||
        __builtin_mul_overflow(bytes, d->depth ? d->depth : 1, &bytes))
        return MOST;
    return bytes;
}

static uint64_t mipmap_bytes(const CUarray3 *d, unsigned int levels)
{
    CUarray3 level = *d;
    uint64_t sum = 0;
    bool layered = d->flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    for (unsigned int i = 0; i < levels && i < 64; i++) {
        uint64_t bytes = part_bytes(&level);
        if (bytes >= MOST || sum >= MOST)
            return MOST;
        sum += bytes;
        if (level.width <= 1 && level.height <= 1 && (layered || level.depth <= 1))
            break;
        level.width = level.width > 1 ? level.width / 2 : level.width;
        level.height = level.height > 1 ? level.height / 2 : level.height;
        if (!layered)
            level.depth = level.depth > 1 ? level.depth / 2 : level.depth;
    }
    return sum;
}

#define CREATE(name, space, undo, bytes, ...) \
    COUNTED(out && d, charge_begin(p, &c, bytes, HOW_HIDDEN), charge_done(p, &c, (uintptr_t)*out, space), CALL(undo, *out), name, __VA_ARGS__)

#define FLAT(d) part_bytes(&(CUarray3){(d)->width, (d)->height, 0, (d)->format, (d)->channels, 0})
#define DEEP(d) part_bytes(&(CUarray3){(d)->width, (d)->height, (d)->depth, (d)->format, (d)->channels, (d)->flags})

EXPORT CUresult cuArrayCreate(CUarray *out, const CUarray2_v1 *d) { CREATE(cuArrayCreate, SPACE_ARRAY, cuArrayDestroy, FLAT(d), out, d) }
EXPORT CUresult cuArrayCreate_v2(CUarray *out, const CUarray2 *d) { CREATE(cuArrayCreate_v2, SPACE_ARRAY, cuArrayDestroy, FLAT(d), out, d) }
EXPORT CUresult cuArray3DCreate(CUarray *out, const CUarray3_v1 *d) { CREATE(cuArray3DCreate, SPACE_ARRAY, cuArrayDestroy, DEEP(d), out, d) }
EXPORT CUresult cuArray3DCreate_v2(CUarray *out, const CUarray3 *d) { CREATE(cuArray3DCreate_v2, SPACE_ARRAY, cuArrayDestroy, part_bytes(d), out, d) }
EXPORT CUresult cuMipmappedArrayCreate(CUmipmap *out, const CUarray3 *d, unsigned int levels)
{
    CREATE(cuMipmappedArrayCreate, SPACE_MIPMAP, cuMipmappedArrayDestroy, mipmap_bytes(d, levels), out, d, levels)
}

#define DESTROY(name, space, handle) FREED((uintptr_t)handle, space, CALL(name, handle), name, handle)

EXPORT CUresult cuArrayDestroy(CUarray array) { DESTROY(cuArrayDestroy, SPACE_ARRAY, array) }
EXPORT CUresult cuMipmappedArrayDestroy(CUmipmap array) { DESTROY(cuMipmappedArrayDestroy, SPACE_MIPMAP, array) }
