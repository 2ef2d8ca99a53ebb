// The transaction kernel on a processor, for tests where no GPU is. Built by host_kernel.py.
#define LETO_RMU_HOST "host_device.h"
#include "transaction.cuh"
#undef float

using namespace leto_rmu;

typedef void (*Body)(const Chunk&);
static Body body;
static const Chunk* chunk;

static const Body bodies[] = {transaction<AdamW, F32, false>, transaction<AdamW, BF16, false>,
                              transaction<AdamW, F16, false>, transaction<SGD, F32, false>,
                              transaction<SGD, BF16, false>,  transaction<SGD, F16, false>,
                              transaction<AdamW, F32, true>,  transaction<AdamW, BF16, true>,
                              transaction<AdamW, F16, true>};

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
            Number x[3] = {planes[0][k], planes[1][k], planes[2][k]};
            AdamW::apply(gradients[k], x, *step);
            for (int p = 0; p < 3; ++p) planes[p][k] = x[p].value;
        } else {
            Number x[2] = {planes[0][k], planes[1][k]};
            SGD::apply(gradients[k], x, *step);
            for (int p = 0; p < 2; ++p) planes[p][k] = x[p].value;
        }
    }
}

// How many roots of the numbers with these bits, first to last, differ from the exact ones; or -1: one is not fit.
extern "C" int64_t roots(uint32_t first, uint32_t last) {
    int64_t wrong = 0;
    for (uint64_t bits = first; bits <= last; ++bits) {
        const float a = ::__uint_as_float((unsigned)bits);
        if (!fit_for_root(a)) return -1;
        wrong += ::__float_as_uint(quick_root(a).value) != ::__float_as_uint(sqrtf(a));
    }
    return wrong;
}

// How many quotients differ from the exact ones, or -1 if more than half of them are of numbers that are not fit.
extern "C" int64_t quotients(uint64_t count, const float* a, const float* b) {
    int64_t wrong = 0;
    uint64_t fit = 0;
    for (uint64_t k = 0; k < count; ++k) {
        if (!fit_dividend(a[k]) || !fit_divisor(b[k])) continue;
        ++fit;
        wrong += ::__float_as_uint(quick_div(a[k], b[k], reciprocal(b[k])).value) != ::__float_as_uint(a[k] / b[k]);
    }
    return 2 * fit < count ? -1 : wrong;
}
