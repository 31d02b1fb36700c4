// The flags that run and batch share: what to generate, with which engine, recorded how. Each is
// also a KVW_* variable and a key of the configuration file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "cli/models.h"
#include "cli/options.h"
#include "src/engine/sampler.h"

namespace kvw::cli {

struct GenerationFlags {
    std::optional<std::uint32_t> tokens_max;  // unset: what the limits leave
    std::optional<std::uint64_t> seed;
    SamplingOptions sampling;
    // Raw takes the prompt as it is; chat insists on a template; neither: a template if there is
    // one.
    bool raw = false, chat = false;
    std::optional<std::string> template_name, system;
};

// What [tenants.NAME] says in place of [limits]; unset = the same as for everyone.
struct TenantLimits {
    std::optional<std::uint64_t> quota_rows;  // 0 = no quota
    std::optional<std::int64_t> deadline_ms;  // 0 = no deadline
};

struct EngineFlags {
    ModelFlags model;
    std::uint32_t context = 0;                      // 0 = the model's
    std::uint64_t pool_rows = 0, prefill_rows = 0;  // 0 = one context
    std::string roles = "unified";                  // or split
    std::string scope = "tenant";                   // or session, request
    std::string cotenancy = "any";                  // or none
    std::uint64_t quota_rows = 0;                   // rows a tenant holds at once; 0 = no quota
    std::uint32_t queue_max = 1024;                 // requests that wait
    std::int64_t deadline_ms = 0;                   // from submit; 0 = none
    std::map<std::string, TenantLimits> tenants;    // [tenants.NAME], by name
    std::uint32_t sequences_max = 64;               // requests at once
    std::uint32_t batch = 2048, step_rows = 512;    // the smaller counts
    std::string tenant = "local";
    std::string session;                // "" = none
    double spot_check_percent = 0;      // of requests run again alone while serving
    std::string on_violation = "stop";  // or continue

    std::uint64_t quota_rows_of(const std::string& tenant_name) const;
    std::int64_t deadline_ms_of(const std::string& tenant_name) const;
};

struct TraceFlags {
    std::optional<std::string> trace, trace_dir, key_dir;
    bool no_trace = false, sync = false, force = false;
    std::string text_mode = "plain", on_trace_error = "stop";
};

// Each begins a group of its own in the help.
void add_generation_flags(Flags& flags, GenerationFlags& generation);
void add_template_flags(Flags& flags,
                        GenerationFlags& generation);  // --sys --raw --chat --template
void add_engine_flags(Flags& flags, EngineFlags& engine);
void add_trace_flags(Flags& flags, TraceFlags& trace);

}  // namespace kvw::cli
