// The transaction kernel on a processor, for tests where no GPU is. Built by host_kernel.py.
#define LETO_RMU_HOST "host_device.h"
#include "transaction.cuh"

using namespace leto_rmu;

typedef void (*Body)(const Chunk&);
static Body body;
static const Chunk* chunk;

static const Body bodies[] = {transaction<AdamW, F32>, transaction<AdamW, BF16>, transaction<AdamW, F16>,
                              transaction<SGD, F32>,   transaction<SGD, BF16>,   transaction<SGD, F16>};

static void life() {
    body(*chunk);
    fibers[threadIdx.x].done = true;
}

extern "C" void run(int kernel, const Chunk* c, unsigned blocks, uint64_t shared_bytes, unsigned seed) {
    std::mt19937 random(seed);
    body = bodies[kernel];
    chunk = c;
    fibers.resize(THREADS);
    std::vector<unsigned> order(THREADS);
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        block_memory.assign(shared_bytes / 8, 0xa5a5a5a5a5a5a5a5ull);
        for (unsigned t = 0; t < THREADS; ++t) {
            Fiber& f = fibers[t];
            order[t] = t;
            f.done = false;
            f.groups.clear();
            f.open.clear();
            f.stack.resize(64 << 10);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &scheduler;
            makecontext(&f.context, life, 0);
        }
        for (bool more = true; more;) {  // from one barrier to the next
            std::shuffle(order.begin(), order.end(), random);
            more = false;
            for (unsigned t : order)
                if (!fibers[t].done) {
                    threadIdx.x = t;
                    swapcontext(&scheduler, &fibers[t].context);
                    more |= !fibers[t].done;
                }
        }
    }
}

// The rule itself, element by element: what the kernel must make of each.
extern "C" void apply(int rule, uint64_t count, const float* gradients, float* const* planes, const Step* step) {
    for (uint64_t k = 0; k < count; ++k) {
        if (rule == 0) {
            float x[3] = {planes[0][k], planes[1][k], planes[2][k]};
            AdamW::apply(gradients[k], x, *step);
            for (int p = 0; p < 3; ++p) planes[p][k] = x[p];
        } else {
            float x[2] = {planes[0][k], planes[1][k]};
            SGD::apply(gradients[k], x, *step);
            for (int p = 0; p < 2; ++p) planes[p][k] = x[p];
        }
    }
}
