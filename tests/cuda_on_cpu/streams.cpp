// The CUDA runtime's streams and events.
//
// Streams are as asynchronous as those of a GPU: a thread works on each, as late as STANDIN_DELAY_US says.
#include "work.hpp"

#include <cuda_runtime_api.h>

#include <random>
#include <time.h>
#include <unistd.h>

namespace standin {
namespace {
// Never destroyed: threads work on the streams until the process is gone.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
struct Device {
    Stream null;
    std::vector<Stream*> streams;
};
std::vector<Device*>& devices = *new std::vector<Device*>;
std::map<void*, Stream*>& by_handle = *new std::map<void*, Stream*>;

void work_on(Stream* stream) {
    const int delay = number("STANDIN_DELAY_US", 0);
    std::minstd_rand random((unsigned)(std::uintptr_t)stream ^ (unsigned)getpid());
    set_current_device(stream->device);
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [&] { return !stream->queue.empty() || stream->is_over; });
        if (stream->queue.empty()) return;
        const TaskPointer task = stream->queue.front();
        for (const auto& each : task->after) changed.wait(lock, [&] { return each->done; });
        task->after.clear();
        lock.unlock();
        if (delay) {
            const timespec pause = {0, (long)(random() % (2 * delay)) * 1000};
            nanosleep(&pause, nullptr);
        }
        task->work();
        task->work = nullptr;
        lock.lock();
        task->finished = now();
        task->done = true;
        stream->queue.pop_front();
        changed.notify_all();
    }
}

void begin(Stream* stream, int device, bool is_null, bool is_blocking) {
    stream->device = device;
    stream->is_null = is_null;
    stream->is_blocking = is_blocking;
    stream->thread = std::thread(work_on, stream);
    stream->thread.detach();
}

void initialize() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (int index = 0; index < device_count(); ++index) {
            devices.push_back(new Device);
            begin(&devices.back()->null, index, true, true);
        }
    });
}

}  // namespace

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

Stream* stream_of(void* handle) {
    initialize();
    if (handle == nullptr || handle == cudaStreamLegacy) return &devices[(std::size_t)current_device()]->null;
    if (handle == cudaStreamPerThread) {
        thread_local std::map<int, cudaStream_t> mine;
        cudaStream_t& stream = mine[current_device()];
        if (!stream) cudaStreamCreateWithFlags(&stream, 0);
        handle = stream;
    }
    std::unique_lock<std::mutex> lock(mutex);
    auto found = by_handle.find(handle);
    return found == by_handle.end() ? nullptr : found->second;
}

TaskPointer put(Stream* stream, std::function<void()> work, std::vector<TaskPointer> after) {
    auto task = std::make_shared<Task>();
    task->work = std::move(work);
    task->after = std::move(after);
    std::unique_lock<std::mutex> lock(mutex);
    Device* device = devices[(std::size_t)stream->device];
    if (stream->is_null) {
        for (Stream* other : device->streams)
            if (other->is_blocking && other->last && !other->last->done) task->after.push_back(other->last);
    } else if (stream->is_blocking && device->null.last && !device->null.last->done) {
        task->after.push_back(device->null.last);
    }
    stream->queue.push_back(task);
    stream->last = task;
    changed.notify_all();
    return task;
}

void wait_for(const TaskPointer& task) {
    if (!task) return;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return task->done; });
}

void wait_on_host(const TaskPointer& task) {
    count(Counted::host_waits);
    wait_for(task);
}

void wait_for_device(int index) {
    initialize();
    std::vector<TaskPointer> all;
    {
        std::unique_lock<std::mutex> lock(mutex);
        Device* device = devices[(std::size_t)index];
        all.push_back(device->null.last);
        for (Stream* each : device->streams) all.push_back(each->last);
    }
    for (const auto& each : all) wait_for(each);
}

}  // namespace standin

using namespace standin;

namespace {
struct Event {
    TaskPointer task;
    bool is_timed;
};

}  // namespace

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
    initialize();
    auto* stream = new Stream;
    begin(stream, current_device(), false, !(flags & cudaStreamNonBlocking));
    std::unique_lock<std::mutex> lock(mutex);
    devices[(std::size_t)current_device()]->streams.push_back(stream);
    by_handle[stream] = stream;
    *made = (cudaStream_t)stream;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int) {
    return cudaStreamCreateWithFlags(made, flags);
}
cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithFlags(made, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    std::unique_lock<std::mutex> lock(mutex);
    auto found = by_handle.find(handle);
    if (found == by_handle.end()) return failed(cudaErrorInvalidResourceHandle);
    found->second->is_over = true;  // what is on it is still done
    by_handle.erase(found);
    changed.notify_all();
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    if (stream->is_null)  // it is behind all blocking streams
        wait_on_host(put(stream, [] {}));
    else
        wait_on_host(stream->last);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    std::unique_lock<std::mutex> lock(mutex);
    return !stream->last || stream->last->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    const TaskPointer task = ((Event*)event)->task;
    count(Counted::stream_waits);
    if (task) put(stream, [] {}, {task});
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    put(stream, [=] { function(handle, cudaSuccess, data); });
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    put(stream, [=] { function(data); });
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    return *flags = stream->is_blocking ? 0 : cudaStreamNonBlocking, cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }

// The driver's: a number of 32 bits, written to memory that the host sees too.
int cuStreamWriteValue32_v2(void* handle, unsigned long long address, std::uint32_t value, unsigned) {
    Stream* stream = stream_of(handle);
    Memory memory;
    if (!stream || !find((void*)address, &memory)) return cudaErrorInvalidValue;
    put(stream, [=] { *(volatile std::uint32_t*)address = value; });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    initialize();
    *event = (cudaEvent_t) new Event{nullptr, !(flags & cudaEventDisableTiming)};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Event*)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    count(Counted::records);
    ((Event*)event)->task = put(stream, [] {});
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_on_host(((Event*)event)->task), cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    const TaskPointer task = ((Event*)event)->task;
    std::unique_lock<std::mutex> lock(mutex);
    return !task || task->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
    const auto *from = (Event*)start, *to = (Event*)stop;
    if (!from->task || !to->task || !from->is_timed || !to->is_timed) return failed(cudaErrorInvalidResourceHandle);
    std::unique_lock<std::mutex> lock(mutex);
    if (!from->task->done || !to->task->done) return cudaErrorNotReady;
    return *milliseconds = (float)(1e3 * (to->task->finished - from->task->finished)), cudaSuccess;
}
}
