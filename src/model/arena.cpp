#include "src/model/arena.h"

#include <sys/mman.h>

#include <string>
#include <utility>

namespace kvw {

Result<Arena> Arena::create(std::size_t bytes, std::string_view what) {
    Arena arena;
    if (bytes == 0) {
        return arena;
    }
    void* const data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return Error{ErrorCode::out_of_memory,
                     std::string(what) + " needs " + std::to_string(bytes) +
                         " bytes of memory, more than this machine or process may have"};
    }
    madvise(data, bytes, MADV_HUGEPAGE);  // a wish; without huge pages it is only slower
    madvise(data, bytes, MADV_DONTDUMP);  // scratch holds what prompts became
    arena.data_ = static_cast<std::uint8_t*>(data);
    arena.size_ = bytes;
    return arena;
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

Arena::~Arena() {
    if (data_ != nullptr) {
        munmap(data_, size_);
    }
}

}  // namespace kvw
