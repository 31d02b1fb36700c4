#include "src/base/result.h"

namespace kvw {

const char* error_name(ErrorCode code) {
    switch (code) {
        case ErrorCode::usage:
            return "usage";
        case ErrorCode::file_exists:
            return "file_exists";
        case ErrorCode::bad_model:
            return "bad_model";
        case ErrorCode::bad_trace:
            return "bad_trace";
        case ErrorCode::bad_input:
            return "bad_input";
        case ErrorCode::bad_template:
            return "bad_template";
        case ErrorCode::nonfinite:
            return "nonfinite";
        case ErrorCode::exceed_context_size:
            return "exceed_context_size";
        case ErrorCode::prefill_pool:
            return "prefill_pool";
        case ErrorCode::decode_pool:
            return "decode_pool";
        case ErrorCode::out_of_pages:
            return "out_of_pages";
        case ErrorCode::tenant_quota:
            return "tenant_quota";
        case ErrorCode::queue_full:
            return "queue_full";
        case ErrorCode::deadline:
            return "deadline";
        case ErrorCode::io:
            return "io";
        case ErrorCode::disk_full:
            return "disk_full";
        case ErrorCode::out_of_memory:
            return "out_of_memory";
        case ErrorCode::no_device:
            return "no_device";
        case ErrorCode::key_folder:
            return "key_folder";
        case ErrorCode::file_changed:
            return "file_changed";
        case ErrorCode::not_closed:
            return "not_closed";
        case ErrorCode::torn:
            return "torn";
        case ErrorCode::violation:
            return "violation";
        case ErrorCode::invariant:
            return "invariant";
        case ErrorCode::cancelled:
            return "cancelled";
    }
    return "unknown";
}

int exit_code(ErrorCode code) {
    switch (code) {
        case ErrorCode::usage:
        case ErrorCode::file_exists:
            return 2;
        case ErrorCode::bad_model:
        case ErrorCode::bad_trace:
        case ErrorCode::bad_input:
        case ErrorCode::bad_template:
        case ErrorCode::nonfinite:
            return 3;
        case ErrorCode::exceed_context_size:
        case ErrorCode::prefill_pool:
        case ErrorCode::decode_pool:
        case ErrorCode::out_of_pages:
        case ErrorCode::tenant_quota:
        case ErrorCode::queue_full:
        case ErrorCode::deadline:
            return 4;
        case ErrorCode::io:
        case ErrorCode::disk_full:
        case ErrorCode::out_of_memory:
        case ErrorCode::no_device:
        case ErrorCode::key_folder:
        case ErrorCode::file_changed:
            return 5;
        case ErrorCode::not_closed:
        case ErrorCode::torn:
            return 6;
        case ErrorCode::violation:
        case ErrorCode::invariant:
            return 7;
        case ErrorCode::cancelled:
            return 130;
    }
    return 7;
}

}  // namespace kvw
