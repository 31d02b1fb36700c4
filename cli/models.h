// A model file ready to run: mapped, hashed, tokenizer and weights loaded, threads started.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cli/options.h"
#include "cli/session.h"
#include "src/engine/engine.h"
#include "src/gguf/gguf.h"
#include "src/model/model.h"
#include "src/text/tokenizer.h"

namespace kvw::cli {

struct ModelFlags {
    std::optional<std::string> model;
    std::optional<std::uint32_t> threads;
    std::string isa = "auto";
    std::string device = "auto";
    bool rehash = false;
};
void add_model_flag(Flags& flags, ModelFlags& model);    // -m
void add_device_flags(Flags& flags, ModelFlags& model);  // --isa --device --rehash
void add_model_flags(Flags& flags, ModelFlags& model);   // -m -t and those
// Device and instruction set, before any file is opened. Fails: usage, no_device.
Result<const Kernels*> choose_kernels(const ModelFlags& flags);
// What -m says, or the default model in this folder. Fails: usage, naming -m.
Result<std::string> model_path(const std::optional<std::string>& given);
// Before any other work: is there a model to load? --device sim needs none.
Status check_model(const ModelFlags& flags);
unsigned thread_count(const ModelFlags& flags);

struct LoadedModel {
    std::unique_ptr<Gguf> gguf;  // at a fixed place: the tokenizer looks into it; null for sim
    std::unique_ptr<Tokenizer> tokenizer;
    std::unique_ptr<ThreadPool> threads;
    std::unique_ptr<Model> model;
    const Kernels* kernels = nullptr;
    ModelIdentity identity;
    double load_ms = 0;
    const char* device() const { return model->is_sim() ? "sim" : "cpu"; }
};
// Hashes in a thread of its own while weights are packed, unless the digest is known already.
// Fails: what opening and loading fail with; file_changed when the file is another one afterwards.
Result<LoadedModel> load_model(const ModelFlags& flags, Progress& progress);

// The SHA-256 of a model file, remembered in the cache folder by device, inode, size and time of
// change.
std::optional<Digest256> remembered_sha256(const FileIdentity& identity);
void remember_sha256(const FileIdentity& identity, const Digest256& digest, std::int64_t wall_ns);

}  // namespace kvw::cli
