#include "cli/models.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <sstream>
#include <thread>

#include "cli/places.h"
#include "cli/signals.h"
#include "src/base/random.h"

namespace kvw::cli {

namespace {

constexpr const char* kDefaultModel = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
constexpr std::uint64_t kCacheBytesMax = 1 << 20;
constexpr std::size_t kHashBlock = 1 << 20;

Result<FileIdentity> identity_of(const Path& path) {
    const Result<File> file = File::open_read(path);
    if (!file) {
        return file.error();
    }
    return file->identity();
}

std::string key_of(const FileIdentity& identity) {
    return fmt::format("{} {} {} {} ", identity.device, identity.inode, identity.size,
                       identity.modified_ns);
}

Result<Path> cache_file() {
    const Result<Path> folder = cache_folder();
    if (!folder) {
        return folder.error();
    }
    return *folder / "model-sha256";
}

Digest256 hash_of(const Gguf& gguf) {
    Sha256 hash;
    std::span<const std::uint8_t> rest = gguf.file_bytes();
    while (!rest.empty()) {
        const std::size_t n = std::min(rest.size(), kHashBlock);
        hash.update(rest.first(n));
        rest = rest.subspan(n);
    }
    return hash.digest();
}

// Computes a digest beside the caller's work; join() before it is read.
class Hashing {
  public:
    Hashing(const Gguf& gguf, bool wanted) {
        if (wanted) {
            thread_ = std::thread([this, &gguf] { digest_ = hash_of(gguf); });
        }
    }
    ~Hashing() { join(); }
    void join() {
        if (thread_.joinable()) {
            thread_.join();
        }
    }
    const Digest256& digest() const { return digest_; }

  private:
    Digest256 digest_{};
    std::thread thread_;
};

std::string name_of_model(const Gguf& gguf) {
    const Result<std::string_view> name = gguf.string_at("general.name");
    return name && !name->empty() ? std::string(*name) : gguf.path().stem().string();
}

}  // namespace

void add_model_flag(Flags& flags, ModelFlags& model) {
    flags.section("generation").text("-m,--model", "FILE", model.model, "Model file (GGUF)");
}

void add_device_flags(Flags& flags, ModelFlags& model) {
    flags.section("engine")
        .choice("--isa", model.isa, {"auto", "ref", "avx2", "avx512"},
                "Instruction set; all give the same bits")
        .choice("--device", model.device, {"auto", "cpu", "cuda", "sim"}, "Where to compute")
        .flag("--rehash", model.rehash,
              "Compute the file's SHA-256 again instead of trusting the cache");
}

void add_model_flags(Flags& flags, ModelFlags& model) {
    add_model_flag(flags, model);
    flags.section("engine").whole("-t,--threads", model.threads, 1, 1024,
                                  "Threads; default: all processors this process may use");
    add_device_flags(flags, model);
}

Result<const Kernels*> choose_kernels(const ModelFlags& flags) {
    if (flags.device == "cuda") {
        return Error{ErrorCode::no_device, "this build has no CUDA device; --device cpu works"};
    }
    if (flags.device == "sim") {
        return &sim_kernels();
    }
    const Kernels* kernels = kernels_named(flags.isa);
    if (kernels == nullptr) {
        return Error{ErrorCode::no_device,
                     fmt::format("this processor has no {}; --isa auto takes the best it has "
                                 "({})",
                                 flags.isa, best_kernels().isa)};
    }
    return kernels;
}

Status check_model(const ModelFlags& flags) {
    if (flags.device == "sim") {
        // -m may come from the configuration or a variable; the hash model needs none.
        return {};
    }
    const Result<std::string> path = model_path(flags.model);
    return path ? Status{} : Status(path.error());
}

Result<std::string> model_path(const std::optional<std::string>& given) {
    if (given) {
        return *given;
    }
    std::error_code ignored;
    if (std::filesystem::is_regular_file(kDefaultModel, ignored)) {
        return std::string(kDefaultModel);
    }
    return Error{ErrorCode::usage,
                 fmt::format("no model: give one with -m FILE or KVW_MODEL (there is no {} here)",
                             kDefaultModel)};
}

unsigned thread_count(const ModelFlags& flags) {
    return flags.threads.value_or(usable_processors());
}

Result<LoadedModel> load_model(const ModelFlags& flags, Progress& progress) {
    const auto start = std::chrono::steady_clock::now();
    LoadedModel loaded;
    const Result<const Kernels*> kernels = choose_kernels(flags);
    if (!kernels) {
        return kernels.error();
    }
    loaded.kernels = *kernels;
    if (loaded.kernels == &sim_kernels()) {
        loaded.threads = std::make_unique<ThreadPool>(1);
        loaded.tokenizer = std::make_unique<Tokenizer>(Tokenizer::of_bytes());
        loaded.model = Model::sim();
        loaded.identity = {loaded.model->config().name, sim_sha256()};
        loaded.load_ms = seconds_since(start) * 1000;
        return loaded;
    }
    const Result<std::string> path = model_path(flags.model);
    if (!path) {
        return path.error();
    }
    Result<Gguf> gguf = Gguf::open(*path);
    if (!gguf) {
        return gguf.error();
    }
    loaded.gguf = std::make_unique<Gguf>(std::move(*gguf));
    const FileIdentity identity = loaded.gguf->identity();
    const std::optional<Digest256> known =
        flags.rehash ? std::nullopt : remembered_sha256(identity);
    Hashing hashing(*loaded.gguf, !known);

    loaded.threads = std::make_unique<ThreadPool>(thread_count(flags));
    Result<Tokenizer> tokenizer = Tokenizer::create(*loaded.gguf);
    if (!tokenizer) {
        return tokenizer.error();
    }
    loaded.tokenizer = std::make_unique<Tokenizer>(std::move(*tokenizer));
    progress.begin();
    Result<std::unique_ptr<Model>> model =
        Model::load(*loaded.gguf, *loaded.threads,
                    [&](double fraction) { progress.show("loading", fraction); });
    progress.clear();
    if (!model) {
        return model.error();
    }
    loaded.model = std::move(*model);
    hashing.join();

    const Result<FileIdentity> now = identity_of(*path);
    if (!now || *now != identity) {
        return Error{ErrorCode::file_changed,
                     fmt::format("{} changed while it was being loaded", *path)};
    }
    loaded.identity = {name_of_model(*loaded.gguf), known ? *known : hashing.digest()};
    if (!known) {
        remember_sha256(identity, loaded.identity.sha256, SystemClock().wall_ns());
    }
    loaded.gguf->drop_cached_pages();
    loaded.load_ms = seconds_since(start) * 1000;
    if (stop_signal() != 0) {
        return Error{ErrorCode::cancelled, "stopped by a signal"};
    }
    return loaded;
}

std::optional<Digest256> remembered_sha256(const FileIdentity& identity) {
    const Result<Path> path = cache_file();
    const Result<std::string> text =
        path ? read_file(*path, kCacheBytesMax) : Result<std::string>(path.error());
    if (!text) {
        return std::nullopt;
    }
    const std::string key = key_of(identity);
    std::istringstream lines(*text);
    std::string line;
    while (std::getline(lines, line)) {
        const std::string bytes = line.starts_with(key) ? unhex(line.substr(key.size())) : "";
        if (bytes.size() == std::tuple_size_v<Digest256>) {
            Digest256 digest;
            std::copy(bytes.begin(), bytes.end(), digest.begin());
            return digest;
        }
    }
    return std::nullopt;
}

void remember_sha256(const FileIdentity& identity, const Digest256& digest, std::int64_t wall_ns) {
    // A file changed within the clock's resolution of now could change again under the same time.
    if (wall_ns - identity.modified_ns < 2'000'000'000) {
        return;
    }
    const Result<Path> path = cache_file();
    if (!path || !make_folders(path->parent_path())) {
        return;  // a cache is a convenience
    }
    // Newest first, one line per file, at most 100 files.
    const std::string key = key_of(identity);
    std::string text = key + hex(digest) + "\n";
    const Result<std::string> old = read_file(*path, kCacheBytesMax);
    std::istringstream lines(old ? *old : "");
    std::string line;
    for (int kept = 1; kept < 100 && std::getline(lines, line);) {
        if (!line.starts_with(key)) {
            text += line + "\n";
            ++kept;
        }
    }
    const Path temporary = path->string() + fmt::format(".{:016x}", entropy64());
    Result<File> file = File::create(temporary);
    if (file && file->write_all(text)) {
        file->close();
        if (rename_replace(temporary, *path)) {
            return;
        }
    }
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
}

}  // namespace kvw::cli
