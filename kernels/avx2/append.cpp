#include "kernels/wide/append.h"

#include "kernels/avx2/lanes.h"
#include "kernels/avx2/operations.h"

namespace kvw::avx2 {

void append(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
            std::uint32_t kv_head, const float* k, const float* v) {
    wide::append<Lanes, PlainAccess>(memory, sequence, layer, kv_head, k, v);
}

void append_checked(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                    std::uint32_t kv_head, const float* k, const float* v) {
    wide::append<Lanes, CheckedAccess>(memory, sequence, layer, kv_head, k, v);
}

}  // namespace kvw::avx2
