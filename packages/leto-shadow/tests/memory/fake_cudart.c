/* A declared mock of what a machine without a GPU cannot do: a CUDA runtime over a simulated device.
 *
 * The device is a file shared by all processes that use it (FAKE_GPU): its size and who holds how much. As with a
 * real one, memory of a process comes back when the process is really dead, and FAKE_GPU_DELAY_MS later. Errors
 * stay until they are asked for. Nothing else of CUDA is here.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { HOLDERS = 64, BLOCKS = 4096, OUT_OF_MEMORY = 2 };
struct device {
    uint64_t total, delay_ms;
    struct { uint64_t pid, bytes, dead_ms; } holder[HOLDERS];
};
static struct device *device;
static int device_fd = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct { void *at; uint64_t size; } blocks[BLOCKS];
static __thread int error;
static __thread int capture_mode;

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static int is_dead(uint64_t pid)
{
    char path[64], text[512], *state;
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 1;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return 1;
    text[got] = 0;
    state = strrchr(text, ')');
    return state && (state[2] == 'Z' || state[2] == 'X');
}

static void enter(void)
{
    pthread_mutex_lock(&mutex);
    if (!device) {
        device_fd = open(getenv("FAKE_GPU"), O_RDWR | O_CLOEXEC);
        device = mmap(NULL, sizeof *device, PROT_READ | PROT_WRITE, MAP_SHARED, device_fd, 0);
    }
    flock(device_fd, LOCK_EX);
}

static void leave(void)
{
    flock(device_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
}

static uint64_t used(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < HOLDERS; i++) {
        if (!device->holder[i].bytes)
            continue;
        if (is_dead(device->holder[i].pid)) {
            if (!device->holder[i].dead_ms)
                device->holder[i].dead_ms = now_ms();
            if (now_ms() - device->holder[i].dead_ms >= device->delay_ms) {
                memset(&device->holder[i], 0, sizeof device->holder[i]);
                continue;
            }
        }
        sum += device->holder[i].bytes;
    }
    return sum;
}

static uint64_t *mine(void)
{
    int empty = -1;
    for (int i = 0; i < HOLDERS; i++) {
        if (device->holder[i].bytes && device->holder[i].pid == (uint64_t)getpid())
            return &device->holder[i].bytes;
        if (empty < 0 && !device->holder[i].bytes)
            empty = i;
    }
    device->holder[empty].pid = (uint64_t)getpid();
    device->holder[empty].dead_ms = 0;
    return &device->holder[empty].bytes;
}

int cudaMalloc(void **pointer, size_t size)
{
    static uint64_t next = 1u << 20;
    int result = OUT_OF_MEMORY;
    enter();
    if (used() + size <= device->total) {
        for (int i = 0; i < BLOCKS; i++) {
            if (blocks[i].at)
                continue;
            *mine() += size;
            *pointer = blocks[i].at = (void *)(uintptr_t)(next += 1u << 20);
            blocks[i].size = size;
            result = 0;
            break;
        }
    }
    leave();
    if (result)
        error = result;
    return result;
}

int cudaFree(void *pointer)
{
    int result = 1;
    enter();
    for (int i = 0; i < BLOCKS && pointer; i++) {
        if (blocks[i].at == pointer) {
            *mine() -= blocks[i].size;
            blocks[i].at = NULL;
            result = 0;
        }
    }
    leave();
    return result;
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    enter();
    *total_bytes = device->total;
    *free_bytes = device->total - used();
    leave();
    return 0;
}

int cudaGetLastError(void)
{
    int last = error;
    error = 0;
    return last;
}

int cudaPeekAtLastError(void)
{
    return error;
}

int cudaGetDevice(int *number)
{
    *number = 0;
    return 0;
}

int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}
