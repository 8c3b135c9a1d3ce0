// A loop over independent pieces of work, and scratch memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace headway {

// Calls body(i) for every i; no thread is started or woken where one is asked for or one piece is all there is.
template <class Body>
void parallel_for(int64_t count, int64_t num_threads, const Body& body) {
#if defined(_OPENMP)
    if (num_threads > 1 && count > 1) {
        const int threads = static_cast<int>(num_threads < count ? num_threads : count);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
#endif
    (void)num_threads;
    for (int64_t i = 0; i < count; i++) body(i);
}

// At least count floats, 64-byte aligned, private to the calling thread until it asks again.
inline float* thread_scratch(int64_t count) {
    struct Buffer {
        float* data = nullptr;
        int64_t size = 0;
        ~Buffer() { std::free(data); }
    };
    static thread_local Buffer buffer;
    if (buffer.size < count) {
        std::free(buffer.data);
        const int64_t bytes = (count * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
        buffer.data = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
        buffer.size = buffer.data ? count : 0;
        if (!buffer.data) std::abort();  // a C ABI has no way to throw; the process is out of memory
    }
    return buffer.data;
}

}  // namespace headway
