/*
 * apply.c - running an op: checks, shape rule, kernel, and the graph.
 *
 * What backward needs is written once, in `needs`: for each input and output
 * of an op, the set of inputs whose gradients read it. Nothing else is saved.
 */
#include <stddef.h>
#include <string.h>

#include "autograd/node.h"
#include "base/context.h"
#include "base/error.h"

/* Sets of inputs, as bits. */
enum { A = 1, B = 2, C = 4, D = 8 };

typedef struct op_needs {
    unsigned char in[4];  /* input k is read by the gradients of these inputs */
    unsigned char out[3]; /* output k likewise */
} op_needs;

static const op_needs needs[FSDP__OP_COUNT] = {
    [FSDP__OP_mul] = {.in = {B, A}},
    [FSDP__OP_div] = {.in = {B, A | B}},
    [FSDP__OP_exp] = {.out = {A}},
    [FSDP__OP_log] = {.in = {A}},
    [FSDP__OP_sqrt] = {.out = {A}},
    [FSDP__OP_pow] = {.in = {A}},
    [FSDP__OP_silu] = {.in = {A}},
    [FSDP__OP_gelu] = {.in = {A}},
    [FSDP__OP_gelu_tanh] = {.in = {A}},
    [FSDP__OP_relu] = {.in = {A}},
    [FSDP__OP_tanh] = {.out = {A}},
    [FSDP__OP_sigmoid] = {.out = {A}},
    [FSDP__OP_swiglu] = {.in = {A | B, A | B}},
    [FSDP__OP_softmax] = {.out = {A}},
    [FSDP__OP_dropout] = {.in = {0, A}},
    [FSDP__OP_linear] = {.in = {B, A}},
    [FSDP__OP_matmul] = {.in = {B, A}},
    [FSDP__OP_embedding] = {.in = {0, A}},
    [FSDP__OP_rms_norm] = {.in = {A | B, A | B}, .out = {0, A | B}},
    [FSDP__OP_layer_norm] = {.in = {A | B, A | B}, .out = {0, A | B, A | B}},
    [FSDP__OP_batch_norm] = {.in = {A | B, A}, .out = {0, A | B, A | B}},
    [FSDP__OP_rotary] = {.in = {0, A, A}},
    [FSDP__OP_attention] = {.in = {A | B | C, A | B | C, A | B | C, A | B | C},
                            .out = {A | B | C, A | B | C}},
    [FSDP__OP_cross_entropy] = {.in = {A, A}, .out = {0, A}},
    [FSDP__OP_head_cross_entropy] = {.in = {A | B | C, A | B | C, A | B | C, A | B | C},
                                     .out = {0, A | B | C}},
    [FSDP__OP_mse_loss] = {.in = {A | B, A | B}},
};

const fsdp__backward_fn fsdp__op_backs[FSDP__OP_COUNT] = {
#define FSDP__OP(name) fsdp__back_##name,
#include "tensor/ops.def"
#undef FSDP__OP
};

static fsdp_status check_inputs(fsdp__opcall *c, bool *dist)
{
    const char *name = fsdp__op_name(c->op);
    fsdp_device d = FSDP_CPU;
    for (int k = 0; k < c->n_in; k++) {
        const fsdp_tensor *t = c->in[k];
        if (!t && (c->optional >> k & 1)) continue;
        if (!t) return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: input %d is NULL", name, k);
        if (k == 0) d = t->st->device;
        if (t->st->device != d && t->dtype != FSDP_U64)
            return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: input 0 is on %s and input %d on %s",
                              name, fsdp_device_name(d), k, fsdp_device_name(t->st->device));
        if (t->dist) *dist = true;
        if (t->st->device == FSDP_CPU) FSDP_TRY(fsdp__tensor_readable(t, name));
    }
    return FSDP_OK;
}

/* The node, with the inputs that it needs saved: before the run, so that a recomputation that has
 * all it needs stops in front of a kernel. NULL: error kept. */
static fsdp__node *build(fsdp__opcall *c, unsigned *wanted)
{
    fsdp__node *n = fsdp__node_create(fsdp__op_name(c->op), fsdp__op_backs[c->op]);
    if (!n) return NULL;
    fsdp_status s = FSDP_OK;
    for (int k = 0; k < c->n_in; k++) {
        FSDP_GO(fsdp__node_input(n, k, c->in[k]));
        if (n->in[k].node) *wanted |= 1u << k;
    }
    for (int k = 0; k < 4; k++)
        if (needs[c->op].in[k] & *wanted) FSDP_GO(fsdp__node_save(n, k, c->in[k]));
done:
    if (s == FSDP_OK) return n;
    fsdp__node_release(n);
    return NULL;
}

/* After the run: attributes, which the shape rule may complete, and outputs. */
static fsdp_status finish(fsdp__opcall *c, fsdp__node *n, unsigned wanted)
{
    memcpy(n->i, c->i, sizeof n->i);
    memcpy(n->f, c->f, sizeof n->f);
    for (int k = 0; k < 3; k++)
        if (needs[c->op].out[k] & wanted)
            FSDP_TRY(fsdp__node_save(n, FSDP__SAVED_OUT + k, c->out[k]));
    for (int k = 0; k < c->n_out; k++)
        FSDP_TRY(fsdp__node_output(n, k, c->out[k]));
    return FSDP_OK;
}

static fsdp_status run(fsdp__opcall *c, fsdp__frame *frame)
{
    unsigned wanted = 0;
    fsdp__node *n = c->grad ? build(c, &wanted) : NULL;
    fsdp_status s = c->grad && !n ? fsdp_error() : FSDP_OK;
    if (s == FSDP_OK && frame) s = fsdp__recompute_before(frame, c);
    if (s == FSDP_OK) s = fsdp__op_shapes[c->op](c);
    if (s == FSDP_OK && !c->is_view && !c->kept && c->in[0]->st->device != FSDP_META)
        s = fsdp__op_runs[c->op](c);
    if (s == FSDP_OK && frame) s = fsdp__recompute_after(frame, c);
    if (s == FSDP_OK && n) s = finish(c, n, wanted);
    fsdp__node_release(n);
    return s;
}

fsdp_tensor *fsdp__apply(fsdp__opcall *c)
{
    bool dist = false, want = false;
    if (fsdp_error() || check_inputs(c, &dist) != FSDP_OK) return NULL;
    if (dist) {
        fsdp__fail(FSDP_UNSUPPORTED,
                   "%s: an input is a sharded parameter; unshard its module first",
                   fsdp__op_name(c->op));
        return NULL;
    }
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (!g) return NULL;
    for (int k = 0; k < c->n_in && g->no_grad == 0; k++)
        want = want || fsdp_requires_grad(c->in[k]);
    /* Integers carry no gradient: a cast to one ends the graph. */
    if (c->op == FSDP__OP_cast && !fsdp_dtype_is_floating((fsdp_dtype)c->i[0])) want = false;
    c->grad = want;
    /* Inner scope: temporaries of the kernel and the statistics, unless saved, end here. */
    fsdp_scope *scope = fsdp_scope_begin();
    if (!scope) return NULL;
    fsdp_status s = run(c, g->frame);
    for (int k = 0; k < c->n_out && s == FSDP_OK; k++)
        fsdp_scope_keep(c->out[k]);
    fsdp_scope_end(scope);
    return s == FSDP_OK && !fsdp_error() ? c->out[0] : NULL;
}
