// How a kernel that was compiled for the processor is called: the same in its module and in the driver.
#pragma once

#include <cstddef>

namespace standin {
struct Launch {
    unsigned grid[3], block[3];
    std::size_t shared;
};
struct Kernel {
    void* (*take)(void** arguments);  // copies them, as a launch does
    void (*run)(void* taken, const Launch& launch);
    void (*drop)(void* taken);
};
}  // namespace standin
