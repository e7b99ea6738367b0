// Devices, their memory and their streams: what all parts of the stand-in for CUDA share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace standin {

// One thing on a stream.
struct Task {
    std::function<void()> work;
    std::vector<std::shared_ptr<Task>> after;
    bool done = false;
    double finished = 0;  // seconds
};
using TaskPointer = std::shared_ptr<Task>;

// A queue, and the thread that works on it.
struct Stream {
    int device;
    bool is_null, is_blocking;
    std::deque<TaskPointer> queue;
    TaskPointer last;
    bool is_over = false;
    std::thread thread;
};

enum class Kind { device, host, managed, pooled, peer };
struct Memory {
    std::uintptr_t begin;
    std::size_t size, mapped;
    Kind kind;
    int device, file;
};

int device_count();
int number_in_machine(int device);
int current_device();
void set_current_device(int device);
double now();

// A stream by CUDA's handle; nullptr when there is none like it.
Stream* stream_of(void* handle);
TaskPointer put(Stream* stream, std::function<void()> work, std::vector<TaskPointer> after = {});
void wait_for(const TaskPointer& task);
void wait_for_device(int device);
// The same, counted: the caller asked for it.
void wait_on_host(const TaskPointer& task);

// What holds this address; false when nothing that CUDA knows does.
bool find(const void* address, Memory* found);
bool is_on_device(const void* address);

// What is counted, in the order in which counters.cpp tells it.
enum class Counted {
    launches,
    copies_on_device,
    bytes_on_device,
    copies_to_host,
    bytes_to_host,
    copies_to_device,
    bytes_to_device,
    fills,
    records,
    stream_waits,
    host_waits,
    allocations,
    pinned_allocations,
    nccl_calls,
    kinds
};
void count(Counted kind, std::size_t number = 1);

// A number of the environment.
int number(const char* name, int otherwise);
// The bytes of a GPU's memory.
std::size_t total_memory();
// What a function of the runtime returns; an error is kept for cudaGetLastError.
int said(int error);
template <class Error>
Error failed(Error error) {
    return (Error)said((int)error);
}
}  // namespace standin
