/* SPDX-License-Identifier: Apache-2.0 */

/* Arrays, which have memory without an address: what their description comes
 * to, in lines of 512 bytes, unless they are sparse or mapped later by hand. */
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

enum { MAX_LEVELS = 16 };

struct array {
    struct context *ctx;
    uint64_t serial;
    struct range *range; /* NULL where it has no memory of its own */
    CUDA_ARRAY3D_DESCRIPTOR shape;
    bool level; /* of a mipmap */
};

struct mipmap {
    struct context *ctx;
    uint64_t serial;
    struct range *range;
    unsigned int levels;
    struct array *level[MAX_LEVELS];
};
_Static_assert(sizeof(struct mipmap) <= OBJECT_ROOM, "a mipmap is an object");

static unsigned int format_bytes(int format)
{
    switch (format) {
    case 0x01: case 0x08: return 1;
    case 0x02: case 0x09: case 0x10: return 2; /* 16 bits, half */
    case 0x03: case 0x0a: case 0x20: return 4; /* 32 bits, float */
    default: return 0;
    }
}

static CUresult array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, uint64_t *bytes)
{
    uint64_t line, lines;
    unsigned int each = format_bytes(d->Format);
    MUST(each && d->Width && (d->NumChannels == 1 || d->NumChannels == 2 || d->NumChannels == 4));
    MUST(!d->Depth || d->Height || (d->Flags & CUDA_ARRAY3D_LAYERED));
    MUST(d->Width <= UINT32_MAX && d->Height <= UINT32_MAX && d->Depth <= UINT32_MAX);
    line = round_up((uint64_t)d->Width * each * d->NumChannels, UNIT);
    lines = (d->Height ? d->Height : 1) * (uint64_t)(d->Depth ? d->Depth : 1);
    MUST(lines <= INT64_MAX / line);
    *bytes = d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) ? 0 : line * lines;
    return CUDA_SUCCESS;
}

/* hidden has so many bytes of the card for an object of the context; small ones
 * lie in blocks, like all that is small. */
static CUresult hidden(const char *call, struct context *c, uint64_t bytes, struct range **out)
{
    *out = NULL;
    if (!bytes)
        return CUDA_SUCCESS;
    if (bytes < BLOCK) {
        CUdeviceptr at;
        TRY(allocate(call, &at, bytes));
        lock();
        *out = range_at(at);
        if (*out)
            (*out)->kind = RANGE_HIDDEN;
        unlock();
        return CUDA_SUCCESS;
    }
    TRY(unsafe_in_capture());
    bytes = round_up(bytes, BLOCK);
    TRY(charge(call, &devices[c->device], (int64_t)bytes));
    lock();
    *out = range_hidden(c->device, c, bytes);
    if (*out)
        (*out)->charged = bytes;
    unlock();
    if (*out)
        return CUDA_SUCCESS;
    charge(call, &devices[c->device], -(int64_t)bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult array_create(const char *call, CUarray *out, CUDA_ARRAY3D_DESCRIPTOR shape)
{
    struct context *c;
    struct range *r;
    uint64_t bytes;
    TRY(current(&c));
    MUST(out);
    TRY(array_bytes(&shape, &bytes));
    TRY(hidden(call, c, bytes, &r));
    lock();
    struct array *a = object_new(ARRAY);
    if (!a) {
        r ? drop_unlock(call, r) : (unlock(), 0);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *a = (struct array){.ctx = c, .serial = c->serial, .range = r, .shape = shape};
    unlock();
    *out = (CUarray)a;
    return CUDA_SUCCESS;
}

API CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d)
{
    TRY(ready());
    MUST(d);
    return array_create("cuArrayCreate_v2", out, (CUDA_ARRAY3D_DESCRIPTOR){d->Width, d->Height, 0, d->Format, d->NumChannels, 0});
}

API CUresult cuArrayCreate(CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *d)
{
    TRY(ready());
    MUST(d);
    return array_create("cuArrayCreate", out, (CUDA_ARRAY3D_DESCRIPTOR){d->Width, d->Height, 0, d->Format, d->NumChannels, 0});
}

API CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    TRY(ready());
    MUST(d);
    return array_create("cuArray3DCreate_v2", out, *d);
}

API CUresult cuArray3DCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d)
{
    TRY(ready());
    MUST(d);
    return array_create("cuArray3DCreate", out, (CUDA_ARRAY3D_DESCRIPTOR){d->Width, d->Height, d->Depth, d->Format, d->NumChannels, d->Flags});
}

/* --- sparse arrays ----------------------------------------------------------- */

/* A tile is a part of a sparse array that has memory: "Maps or unmaps subregions of
 * sparse CUDA arrays and sparse CUDA mipmapped arrays" (cuMemMapArrayAsync). The
 * memory lives as long as it is mapped, by whatever handle. All under the lock. */
static struct tile {
    void *resource;
    const struct context *ctx;
    int part_type;
    cuuint64_t part[4];
    struct memory *memory;
    struct tile *next;
} *tiles;

/* untile_unlock takes a tile out of the list, and gives up the lock. */
static CUresult untile_unlock(const char *call, struct tile **at)
{
    struct tile *t = *at;
    *at = t->next;
    struct memory *m = t->memory;
    free(t);
    return memory_unmap_unlock(call, m);
}

/* untile_all ends the tiles of an array or of a context; the lock is held. */
static void untile_all(const char *call, const void *resource, const struct context *c)
{
    for (struct tile **p = &tiles; *p;)
        if ((resource && (*p)->resource == resource) || (c && (*p)->ctx == c)) {
            untile_unlock(call, p);
            lock();
            p = &tiles; /* the list may have changed */
        } else {
            p = &(*p)->next;
        }
}

void arrays_end(const char *call, const struct context *c) { untile_all(call, NULL, c); }

static CUresult sparse(const CUarrayMapInfo *i)
{
    struct array *a = i->resourceType == CU_RESOURCE_TYPE_ARRAY ? object_get(i->resource, ARRAY) : NULL;
    struct mipmap *m = i->resourceType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY ? object_get(i->resource, MIPMAP) : NULL;
    a = m ? m->level[0] : a;
    if (!a)
        return CUDA_ERROR_INVALID_HANDLE;
    MUST(lives(a->ctx, a->serial) && (a->shape.Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) && !i->flags);
    MUST(i->memOperationType == CU_MEM_OPERATION_TYPE_MAP || (i->memOperationType == CU_MEM_OPERATION_TYPE_UNMAP && !i->memHandle));
    return CUDA_SUCCESS;
}

static CUresult map_one(const char *call, const struct context *c, const CUarrayMapInfo *i)
{
    struct tile *new = calloc(1, sizeof *new);
    if (!new)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    CUresult r = sparse(i);
    if (r == CUDA_SUCCESS && i->memOperationType == CU_MEM_OPERATION_TYPE_MAP) {
        *new = (struct tile){.resource = i->resource, .ctx = c, .part_type = i->subresourceType, .memory = memory_map(i->memHandle, i->offset)};
        memcpy(new->part, i->subresource, sizeof new->part);
        r = new->memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    struct tile **old = &tiles; /* that has the same place */
    while (*old && ((*old)->resource != i->resource || (*old)->part_type != i->subresourceType || memcmp((*old)->part, i->subresource, sizeof new->part) != 0))
        old = &(*old)->next;
    if (r == CUDA_SUCCESS && *old) {
        untile_unlock(call, old);
        lock();
    }
    if (r == CUDA_SUCCESS && new->memory) {
        new->next = tiles;
        tiles = new;
        new = NULL;
    }
    unlock();
    free(new);
    return r;
}

static CUresult map_array(const char *call, const CUarrayMapInfo *list, unsigned int count, CUstream s)
{
    struct context *c;
    TRY(stream_check(s, &c));
    MUST(list && count);
    TRY(unsafe_in_capture());
    for (unsigned int i = 0; i < count; i++) {
        lock();
        CUresult r = sparse(&list[i]);
        unlock();
        TRY(r);
    }
    for (unsigned int i = 0; i < count; i++)
        TRY(map_one(call, c, &list[i]));
    return CUDA_SUCCESS;
}

API CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream s) { return map_array("cuMemMapArrayAsync", list, count, s); }
API CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream s) { return map_array("cuMemMapArrayAsync_ptsz", list, count, per_thread(s)); }

/* --- arrays ------------------------------------------------------------------ */

static CUresult get(CUarray handle, struct array **a)
{
    *a = object_get(handle, ARRAY);
    if (!*a)
        return CUDA_ERROR_INVALID_HANDLE;
    return lives((*a)->ctx, (*a)->serial) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static CUresult shape_of(CUarray handle, CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    struct array *a;
    TRY(ready());
    lock();
    CUresult r = get(handle, &a);
    if (r == CUDA_SUCCESS)
        *shape = a->shape;
    unlock();
    return r;
}

API CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *d, CUarray a)
{
    CUDA_ARRAY3D_DESCRIPTOR s;
    MUST(d);
    TRY(shape_of(a, &s));
    *d = (CUDA_ARRAY_DESCRIPTOR){s.Width, s.Height, s.Format, s.NumChannels};
    return CUDA_SUCCESS;
}

API CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *d, CUarray a)
{
    CUDA_ARRAY3D_DESCRIPTOR s;
    MUST(d);
    TRY(shape_of(a, &s));
    *d = (CUDA_ARRAY_DESCRIPTOR_v1){(unsigned int)s.Width, (unsigned int)s.Height, s.Format, s.NumChannels};
    return CUDA_SUCCESS;
}

API CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *d, CUarray a)
{
    MUST(d);
    return shape_of(a, d);
}

API CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *d, CUarray a)
{
    CUDA_ARRAY3D_DESCRIPTOR s;
    MUST(d);
    TRY(shape_of(a, &s));
    *d = (CUDA_ARRAY3D_DESCRIPTOR_v1){(unsigned int)s.Width, (unsigned int)s.Height, (unsigned int)s.Depth, s.Format, s.NumChannels, s.Flags};
    return CUDA_SUCCESS;
}

API CUresult cuArrayDestroy(CUarray handle)
{
    struct array *a;
    TRY(ready());
    lock();
    CUresult r = get(handle, &a);
    if (r != CUDA_SUCCESS || a->level) {
        unlock();
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_HANDLE;
    }
    struct range *range = a->range;
    object_free(a);
    untile_all("cuArrayDestroy", handle, NULL);
    if (range)
        return drop_unlock("cuArrayDestroy", range);
    unlock();
    return CUDA_SUCCESS;
}

/* --- mipmaps --------------------------------------------------------------- */

static size_t half(size_t n) { return n > 1 ? n / 2 : n; }

API CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels)
{
    struct context *c;
    struct range *r;
    CUDA_ARRAY3D_DESCRIPTOR shape[MAX_LEVELS];
    uint64_t sum = 0, bytes;
    unsigned int most = 1;
    TRY(current(&c));
    MUST(out && d && levels);
    for (size_t n = d->Width > d->Height ? d->Width : d->Height; n > 1 && most < MAX_LEVELS; n /= 2)
        most++;
    levels = levels < most ? levels : most;
    for (unsigned int i = 0; i < levels; i++) {
        shape[i] = i ? shape[i - 1] : *d;
        if (i) {
            shape[i].Width = half(shape[i].Width);
            shape[i].Height = half(shape[i].Height);
            if (!(d->Flags & CUDA_ARRAY3D_LAYERED))
                shape[i].Depth = half(shape[i].Depth);
        }
        TRY(array_bytes(&shape[i], &bytes));
        sum += bytes;
    }
    TRY(hidden("cuMipmappedArrayCreate", c, sum, &r));
    lock();
    struct mipmap *m = object_new(MIPMAP);
    bool ok = m;
    if (m)
        *m = (struct mipmap){.ctx = c, .serial = c->serial, .range = r, .levels = levels};
    for (unsigned int i = 0; ok && i < levels; i++) {
        m->level[i] = object_new(ARRAY);
        ok = m->level[i];
        if (ok)
            *m->level[i] = (struct array){.ctx = c, .serial = c->serial, .shape = shape[i], .level = true};
    }
    unlock();
    *out = (CUmipmappedArray)m;
    return ok ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY; /* of handles, of which there are a million */
}

static CUresult mipmap_get(CUmipmappedArray handle, struct mipmap **m)
{
    *m = object_get(handle, MIPMAP);
    if (!*m)
        return CUDA_ERROR_INVALID_HANDLE;
    return lives((*m)->ctx, (*m)->serial) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

API CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray handle, unsigned int level)
{
    struct mipmap *m;
    TRY(ready());
    MUST(out);
    lock();
    CUresult r = mipmap_get(handle, &m);
    if (r == CUDA_SUCCESS && level >= m->levels)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == CUDA_SUCCESS)
        *out = (CUarray)m->level[level];
    unlock();
    return r;
}

API CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle)
{
    struct mipmap *m;
    TRY(ready());
    lock();
    CUresult r = mipmap_get(handle, &m);
    if (r != CUDA_SUCCESS) {
        unlock();
        return r;
    }
    struct range *range = m->range;
    for (unsigned int i = 0; i < m->levels; i++)
        object_free(m->level[i]);
    object_free(m);
    untile_all("cuMipmappedArrayDestroy", handle, NULL);
    if (range)
        return drop_unlock("cuMipmappedArrayDestroy", range);
    unlock();
    return CUDA_SUCCESS;
}
