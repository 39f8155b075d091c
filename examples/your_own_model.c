/*
 * your_own_model.c - a module of your own, sharded and trained: it learns to add up its inputs.
 *
 *     fsdp run -n 4 build/examples/your_own_model [steps]
 */
#include <stdio.h>
#include <stdlib.h>

#include <fsdp/fsdp.h>

enum { B = 16, C = 32, BLOCKS = 3 }; /* rows a rank, features, blocks */

typedef struct block {
    fsdp_module base; /* first: a block is a module */
    fsdp_module *norm, *up, *down;
} block;

static fsdp_tensor *block_forward(fsdp_module *self, fsdp_tensor *x /* (B,C) */)
{
    block *b = (block *)self;
    fsdp_tensor *h = fsdp_gelu(fsdp_call(b->up, fsdp_call(b->norm, x)));
    return fsdp_add(x, fsdp_call(b->down, h));
}

static fsdp_module *block_create(void)
{
    block *b = (block *)fsdp_module_create(sizeof *b, "Block");
    if (!b) return NULL;
    b->base.forward1 = block_forward;
    b->norm = fsdp_module_add(&b->base, "norm", fsdp_rms_norm_create(C, 1e-5));
    b->up = fsdp_module_add(&b->base, "up", fsdp_linear_create(C, 4 * C, 1));
    b->down = fsdp_module_add(&b->base, "down", fsdp_linear_create(4 * C, C, 1));
    return &b->base;
}

static fsdp_tensor *make_batch(int step, float *y /* (B,1) */)
{
    const int64_t sizes[] = {B, C};
    uint64_t seed = (uint64_t)(step * fsdp_world_size() + fsdp_rank());
    fsdp_tensor *x = fsdp_shift(fsdp_rand(FSDP_F32, 2, sizes, seed, "batch"), -0.5);
    for (int i = 0; x && i < B; i++) {
        y[i] = 0;
        for (int k = 0; k < C; k++)
            y[i] += ((const float *)fsdp_data(x))[i * C + k];
    }
    return x;
}

int main(int argc, char **argv)
{
    int steps = argc > 1 ? atoi(argv[1]) : 200;
    static float y[B];
    const int64_t y_sizes[] = {B, 1};
    fsdp_init(&argc, &argv); /* rank and world from the launcher; alone without one */
    const char *axes[] = {"shard"};
    const int sizes[] = {fsdp_world_size()};
    fsdp_mesh *mesh = fsdp_mesh_create(FSDP_CPU, 1, sizes, axes);

    fsdp_device_push(FSDP_META); /* shapes only: no memory yet */
    const char *names[BLOCKS] = {"block0", "block1", "block2"};
    fsdp_module *model = fsdp_sequential_create();
    for (int i = 0; i < BLOCKS; i++)
        fsdp_module_add(model, names[i], block_create());
    fsdp_module_add(model, "head", fsdp_linear_create(C, 1, 1));
    fsdp_device_pop();

    fsdp_shard_options opt = fsdp_shard_defaults(mesh);
    for (int i = 0; i < BLOCKS; i++)
        fsdp_fully_shard(fsdp_module_child(model, i), &opt); /* one unit a block */
    fsdp_fully_shard(model, &opt);                           /* the rest: the head */
    fsdp_to_empty(model, FSDP_CPU);                          /* each rank's 1/N becomes real */
    fsdp_reset_parameters(model, 42);                        /* the same on any number of ranks */

    fsdp_adamw_options adam = fsdp_adamw_defaults();
    adam.lr = 3e-3;
    fsdp_optimizer *adamw = fsdp_adamw(model, &adam);
    for (int step = 0; step < steps && !fsdp_error(); step++) {
        fsdp_scope *scope = fsdp_scope_begin(); /* whatever the step made ends with it */
        fsdp_tensor *x = make_batch(step, y);
        fsdp_tensor *want = fsdp_tensor_from_memory(y, FSDP_F32, 2, y_sizes, NULL, NULL, NULL);
        fsdp_tensor *loss = fsdp_mse_loss(fsdp_call(model, x), want, FSDP_REDUCE_MEAN);
        fsdp_backward(loss);
        fsdp_clip_grad_norm(model, 1.0, NULL);
        fsdp_optimizer_step(adamw); /* refuses while an error is kept */
        fsdp_zero_grad(model);
        if (fsdp_rank() == 0 && (step % 50 == 0 || step == steps - 1) && !fsdp_error())
            printf("step %d  loss %.5f\n", step, fsdp_item(loss));
        fsdp_scope_end(scope);
    }
    if (fsdp_error()) fprintf(stderr, "rank %d: %s\n", fsdp_rank(), fsdp_error_text());
    fsdp_optimizer_free(adamw);
    fsdp_module_free(model);
    return fsdp_finalize();
}
