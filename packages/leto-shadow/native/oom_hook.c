/* libleto_oom.so: takes the shadow's GPU memory back when an allocation of the active trainer would fail.
 *
 * Paper section 6. Preloaded into trainers (LD_PRELOAD), it stands in front of libcudart's cudaMalloc, which
 * PyTorch's libc10_cuda imports dynamically. The order of events in PyTorch's caching allocator is: cached block;
 * cudaMalloc; release of cached blocks; cudaMalloc of the same size on the same thread; out-of-memory error. So
 *
 *   - the first failure of a size on a thread is passed on: PyTorch flushes its cache and comes back;
 *   - at the second one an OOM is about to surface: ask the agent to end the shadow, wait until the driver says that
 *     memory is free, try again. What still fails then is a real OOM and surfaces with PyTorch's own words.
 *   - where no second call would come (the thread captures a graph, or the caller said so), the first one is taken.
 *
 * Rules: no Python and no lock that Python code can hold, so it works on any thread, with the GIL held or not; every
 * wait has a deadline; without an attached socket, in a forked child, or once the agent is silent or gone, calls pass
 * straight through. The agent never waits for this process. cudaMalloc may not be called in a signal handler, and
 * neither may this. Messages: leto_shadow/oom_protocol.py holds the same layout.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* From the CUDA runtime's stable C interface; its headers are not needed to build this. */
typedef int cudaError_t;
enum { CUDA_SUCCESS_ = 0, CUDA_OUT_OF_MEMORY_ = 2, CAPTURE_RELAXED_ = 2 };
static cudaError_t (*real_malloc)(void **, size_t);
static cudaError_t (*mem_info)(size_t *, size_t *);
static cudaError_t (*last_error)(void);
static cudaError_t (*peek_error)(void);
static cudaError_t (*get_device)(int *);
static cudaError_t (*exchange_capture_mode)(int *);

enum { MAGIC = 0x4d4f4f4c /* "LOOM" */, VERSION = 1, ASK = 1, REPORT = 2, NONE = 1, GONE = 2 };

struct request {
    uint32_t magic;
    uint16_t version, kind;
    uint32_t sequence;
    int32_t device;
    uint64_t size_bytes, free_bytes, total_bytes, freed_bytes, waited_us;
    int32_t result, padding;
};
struct answer {
    uint32_t magic;
    uint16_t version, verdict;
    uint32_t sequence, settle_ms;
};
_Static_assert(sizeof(struct request) == 64 && sizeof(struct answer) == 16, "the layout of oom_protocol.py");

static pthread_once_t resolved = PTHREAD_ONCE_INIT;
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;
static atomic_int agent_fd = -1;
static atomic_int eager; /* take the first failure: the caller makes no second call */
static pid_t owner;
static uint32_t deadline_ms, sequence;
static atomic_ullong calls;
static __thread size_t failed_size; /* size of this thread's failure that PyTorch is answering with a flush */

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static int find_cudart(struct dl_phdr_info *info, size_t size, void *found)
{
    (void)size;
    const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    if (!name || strncmp(name, "/libcudart.so", 13) != 0)
        return 0;
    *(void **)found = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    return *(void **)found != NULL;
}

static void resolve(void)
{
    /* PyTorch loads libcudart into the global scope; a program that does not is served by the search of loaded objects. */
    void *from = RTLD_NEXT;
    if (!dlsym(from, "cudaMalloc")) {
        void *library = NULL;
        dl_iterate_phdr(find_cudart, &library);
        if (!library)
            return;
        from = library;
    }
    mem_info = (cudaError_t(*)(size_t *, size_t *))dlsym(from, "cudaMemGetInfo");
    last_error = (cudaError_t(*)(void))dlsym(from, "cudaGetLastError");
    peek_error = (cudaError_t(*)(void))dlsym(from, "cudaPeekAtLastError");
    get_device = (cudaError_t(*)(int *))dlsym(from, "cudaGetDevice");
    exchange_capture_mode = (cudaError_t(*)(int *))dlsym(from, "cudaThreadExchangeStreamCaptureMode");
    real_malloc = (cudaError_t(*)(void **, size_t))dlsym(from, "cudaMalloc");
}

/* PyTorch sets the thread to the relaxed mode around an allocation under capture, and then makes no second call. */
static int is_capturing(void)
{
    int mode = CAPTURE_RELAXED_, ours;
    if (!exchange_capture_mode || exchange_capture_mode(&mode) != CUDA_SUCCESS_)
        return 0;
    ours = mode;
    exchange_capture_mode(&ours);
    return mode == CAPTURE_RELAXED_;
}

/* Forget the failure of our own call, and no other error. */
static void clear_error(void)
{
    if (peek_error && last_error && peek_error() == CUDA_OUT_OF_MEMORY_)
        last_error();
}

static cudaError_t try_again(void **pointer, size_t size)
{
    clear_error();
    return real_malloc(pointer, size);
}

/* Another thread may be asking; whoever waits finds the memory free afterwards. */
static int lock_before(uint64_t deadline)
{
    const struct timespec pause = {0, 1000000};
    while (pthread_mutex_trylock(&asking) != 0) {
        if (now_us() >= deadline)
            return 0;
        nanosleep(&pause, NULL);
    }
    return 1;
}

static int send_message(int fd, const struct request *message)
{
    ssize_t sent;
    do
        sent = send(fd, message, sizeof *message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof *message;
}

/* 1: the answer to `wanted` is there; 0: not yet; -1: the agent is gone or speaks another language. */
static int receive_answer(int fd, uint32_t wanted, struct answer *answer)
{
    for (;;) {
        ssize_t got = recv(fd, answer, sizeof *answer, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
        if (got != (ssize_t)sizeof *answer || answer->magic != MAGIC || answer->version != VERSION)
            return -1;
        if (answer->sequence == wanted)
            return 1;
        /* an answer that came after its request had given up */
    }
}

static cudaError_t wait_for_memory(int fd, void **pointer, struct request *asked, uint64_t deadline)
{
    size_t size = asked->size_bytes, seen = asked->free_bytes, free_bytes, total_bytes;
    uint64_t until = deadline;
    for (;;) {
        struct pollfd waiting = {fd, POLLIN, 0};
        struct answer answer;
        poll(&waiting, 1, 2); /* also the pause between two looks at the memory */
        int got = fd >= 0 ? receive_answer(fd, asked->sequence, &answer) : 0;
        if (got < 0 || (got > 0 && answer.verdict != GONE))
            return try_again(pointer, size); /* nobody left to take from; memory may have come back by itself */
        if (got > 0) {
            uint64_t settled = now_us() + 1000u * (uint64_t)answer.settle_ms;
            until = settled < deadline ? settled : deadline;
            fd = -1; /* poll ignores it from now on */
        }
        int over = now_us() >= until;
        int readable = mem_info(&free_bytes, &total_bytes) == CUDA_SUCCESS_;
        if (over || (readable && free_bytes >= size && (free_bytes > seen || got > 0))) {
            cudaError_t error = try_again(pointer, size);
            if (error != CUDA_OUT_OF_MEMORY_ || over)
                return error;
        }
        if (readable)
            seen = free_bytes;
    }
}

static cudaError_t reclaim(void **pointer, size_t size)
{
    uint64_t started = now_us(), deadline = started + 1000u * (uint64_t)deadline_ms;
    size_t free_before = 0, free_after = 0, total = 0;
    struct request message = {.magic = MAGIC, .version = VERSION, .kind = ASK, .device = -1, .size_bytes = size};
    if (!lock_before(deadline))
        return try_again(pointer, size);
    int fd = atomic_load(&agent_fd);
    cudaError_t error = try_again(pointer, size);
    if (error == CUDA_OUT_OF_MEMORY_ && fd >= 0 && mem_info(&free_before, &total) == CUDA_SUCCESS_ && size <= total) {
        if (get_device)
            get_device(&message.device);
        message.sequence = ++sequence;
        message.free_bytes = free_before;
        message.total_bytes = total;
        if (send_message(fd, &message)) {
            error = wait_for_memory(fd, pointer, &message, deadline);
            mem_info(&free_after, &total);
            message.kind = REPORT;
            message.free_bytes = free_after;
            free_after += error == CUDA_SUCCESS_ ? size : 0;
            message.freed_bytes = free_after > free_before ? free_after - free_before : 0;
            message.waited_us = now_us() - started;
            message.result = error;
            send_message(fd, &message); /* if it is lost, only a number is */
        }
    }
    pthread_mutex_unlock(&asking);
    return error;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size)
{
    pthread_once(&resolved, resolve);
    if (!real_malloc)
        return 3; /* cudaErrorInitializationError: there is no libcudart behind us */
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    cudaError_t error = real_malloc(pointer, size);
    if (error == CUDA_SUCCESS_) {
        failed_size = 0;
        return error;
    }
    if (error != CUDA_OUT_OF_MEMORY_ || !mem_info || atomic_load(&agent_fd) < 0 || getpid() != owner)
        return error;
    if (failed_size != size && !atomic_load(&eager) && !is_capturing()) {
        failed_size = size;
        return error;
    }
    failed_size = 0;
    error = reclaim(pointer, size);
    if (error == CUDA_SUCCESS_)
        clear_error();
    return error;
}

/* Called by leto_shadow.oom_hook in the trainer, before it uses the device. A descriptor of -1 detaches. */
EXPORT void leto_oom_attach(int fd, uint32_t wait_ms, int take_first_failure)
{
    owner = getpid();
    deadline_ms = wait_ms;
    atomic_store(&eager, take_first_failure);
    atomic_store(&agent_fd, fd);
}

EXPORT void leto_oom_eager(int take_first_failure)
{
    atomic_store(&eager, take_first_failure);
}

/* How many allocations came this way: proof that the caller's cudaMalloc is this one. */
EXPORT uint64_t leto_oom_calls(void)
{
    return atomic_load(&calls);
}

EXPORT int leto_oom_version(void)
{
    return VERSION;
}
