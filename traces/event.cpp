#include "traces/event.h"

namespace kvw {

const char* name_of(RejectReason reason) {
    switch (reason) {
        case RejectReason::exceed_context_size:
            return "exceed_context_size";
        case RejectReason::prefill_pool:
            return "prefill_pool";
        case RejectReason::decode_pool:
            return "decode_pool";
        case RejectReason::out_of_pages:
            return "out_of_pages";
        case RejectReason::tenant_quota:
            return "tenant_quota";
        case RejectReason::queue_full:
            return "queue_full";
        case RejectReason::malformed:
            return "malformed";
    }
    return "unknown";
}

const char* name_of(FinishReason reason) {
    switch (reason) {
        case FinishReason::stop:
            return "stop";
        case FinishReason::length:
            return "length";
        case FinishReason::cancelled:
            return "cancelled";
        case FinishReason::deadline:
            return "deadline";
        case FinishReason::error:
            return "error";
        case FinishReason::violation:
            return "violation";
    }
    return "unknown";
}

const char* name_of(FreeReason reason) {
    switch (reason) {
        case FreeReason::finished:
            return "finished";
        case FreeReason::cancelled:
            return "cancelled";
        case FreeReason::preempted:
            return "preempted";
        case FreeReason::violation:
            return "violation";
        case FreeReason::error:
            return "error";
        case FreeReason::transferred:
            return "transferred";
    }
    return "unknown";
}

const char* name_of(CacheScope scope) {
    switch (scope) {
        case CacheScope::request:
            return "request";
        case CacheScope::session:
            return "session";
        case CacheScope::tenant:
            return "tenant";
    }
    return "unknown";
}

const char* name_of(TextKind kind) {
    switch (kind) {
        case TextKind::key:
            return "key";
        case TextKind::prompt:
            return "prompt";
        case TextKind::prompt_ids:
            return "prompt_ids";
        case TextKind::stop:
            return "stop";
        case TextKind::ids:
            return "ids";
    }
    return "unknown";
}

}  // namespace kvw
