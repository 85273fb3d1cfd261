/* SPDX-License-Identifier: Apache-2.0 */

#include <stdlib.h>

#include "programs.h"

/* A training loop as PyTorch runs one: weights and an optimizer's state that
 * stay; for each step a batch of another size, activations that live from the
 * forward pass to the backward pass, workspaces for the time of one layer, and
 * gradients that are reduced in buckets of 25 MiB on a stream of their own
 * (DistributedDataParallel's bucket_cap_mb). The sizes change with each batch, so
 * that what the allocator has kept of the last one does not quite fit: this is
 * what drives its cache to the edge of the memory that there is. */

enum { LAYERS = 16, SMALL = 64, COMPUTE = 0, REDUCE = 1 };

struct training {
    struct allocator *a;
    void *weight[LAYERS], *state[LAYERS], *small[SMALL];
    void *activation[LAYERS], *gradient[LAYERS];
    uint64_t weights[LAYERS]; /* bytes of each layer */
};

static void *take(struct training *t, uint64_t bytes, int lane)
{
    t->a->r->tally->operations++;
    void *p = t->a->take(t->a->self, bytes, lane);
    if (!p)
        t->a->r->tally->failed++;
    return p;
}

static void give(struct training *t, void **p)
{
    if (!*p)
        return;
    t->a->r->tally->operations++;
    t->a->give(t->a->self, *p);
    *p = NULL;
}

/* step is one batch; batch is in 1/256 of the largest. It returns 0 where memory
 * was not enough, with everything given back that is the batch's own. */
static int step(struct training *t, uint64_t activations, uint64_t batch)
{
    struct allocator *a = t->a;
    struct run *r = a->r;
    int done = 0;
    void *workspace = NULL, *bucket = NULL;
    for (int i = 0; i < LAYERS; i++) {
        uint64_t bytes = activations / LAYERS * batch / 256;
        if (!(t->activation[i] = take(t, bytes, COMPUTE)))
            goto end;
        for (int k = 0; k < 4; k++) { /* what is small and short-lived */
            void *p = take(t, 512 + roll(r, 64 * KiB), COMPUTE);
            if (!p)
                goto end;
            give(t, &p);
        }
        if (!(workspace = take(t, bytes / 4 + 512, COMPUTE)))
            goto end;
        compute(r, a->lanes[COMPUTE]);
        give(t, &workspace);
    }
    for (int i = LAYERS - 1; i >= 0; i--) {
        if (!(t->gradient[i] = take(t, t->weights[i], COMPUTE)))
            goto end;
        compute(r, a->lanes[COMPUTE]);
        give(t, &t->activation[i]);
        if (i % 4 == 0) {
            if (!(bucket = take(t, 25 * MiB, REDUCE)))
                goto end;
            a->used_on(a->self, t->gradient[i], REDUCE);
            compute(r, a->lanes[REDUCE]);
            give(t, &bucket);
        }
    }
    done = 1;
end:
    give(t, &workspace);
    give(t, &bucket);
    for (int i = 0; i < LAYERS; i++) {
        give(t, &t->activation[i]);
        give(t, &t->gradient[i]);
    }
    MUST(r, r->cu->cuStreamSynchronize(a->lanes[COMPUTE])); /* the loss is looked at */
    return done;
}

void train(struct allocator *a, uint64_t bytes)
{
    struct run *r = a->r;
    struct training t = {.a = a};
    /* Weights 1/5, gradients as much, the optimizer's state as much, the rest
     * activations; workspaces and buckets are a part of that. */
    uint64_t weights = bytes / 5, activations = bytes / 3;
    for (int i = 0; i < LAYERS; i++) {
        t.weights[i] = weights / LAYERS * between(r, 200, 300) / 256;
        if (!(t.weight[i] = take(&t, t.weights[i], COMPUTE)))
            fail(r, "no room for the weights");
    }
    for (int i = 0; i < SMALL; i++)
        if (!(t.small[i] = take(&t, between(r, 4, 64) * 512, COMPUTE)))
            fail(r, "no room for the small weights");
    for (unsigned n = 0; going(r); n++) {
        step(&t, activations, between(r, 128, 256));
        if (!n) /* the optimizer's state comes with the first step */
            for (int i = 0; i < LAYERS; i++)
                t.state[i] = take(&t, t.weights[i], COMPUTE);
        if (n % 100 == 99) /* an evaluation, with other shapes */
            for (int k = 0; k < 8; k++) {
                void *p = take(&t, activations / between(r, 3, 9), COMPUTE);
                give(&t, &p);
            }
        if (n % 500 == 499)
            a->empty(a->self);
    }
    for (int i = 0; i < LAYERS; i++) {
        give(&t, &t.weight[i]);
        give(&t, &t.state[i]);
    }
    for (int i = 0; i < SMALL; i++)
        give(&t, &t.small[i]);
    a->empty(a->self);
}
