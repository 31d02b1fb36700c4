#include "kernels/wide/attend.h"

#include "kernels/avx2/lanes.h"
#include "kernels/avx2/operations.h"

namespace kvw::avx2 {

void attend(const AttentionArgs& args, const AttentionItem& item) {
    wide::attend<Lanes, PlainAccess>(args, item);
}

void attend_checked(const AttentionArgs& args, const AttentionItem& item) {
    wide::attend<Lanes, CheckedAccess>(args, item);
}

void attend_merge(const AttentionArgs& args, const SequenceView& sequence, std::uint32_t row,
                  std::uint32_t head_begin, std::uint32_t head_end) {
    wide::attend_merge<Lanes>(args, sequence, row, head_begin, head_end);
}

}  // namespace kvw::avx2
