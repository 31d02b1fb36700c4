// help CMD, and --version.
#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "cli/version.h"
#include "kernels/kernels.h"
#include "traces/trace.h"

namespace kvw::cli {

namespace {

Result<int> print_help(const std::vector<std::string>& words, const Commands& commands,
                       Session& session) {
    const std::string path = joined(words, " ");
    if (!commands.known(path)) {
        return Error{ErrorCode::usage,
                     fmt::format("no command '{}'; kvwitness help lists them", path)};
    }
    if (session.common.json) {
        Json object = session.object();
        object["command"] = path;
        object["text"] = commands.help(path);
        session.out.object(object);
    } else {
        session.out.write(commands.help(path));
    }
    return 0;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
        if (const Kernels* kernels = kernels_for(isa)) {
            names.emplace_back(kernels->isa);
        }
    }
    return names;
}

}  // namespace

void add_help(Commands& commands) {
    const auto words = std::make_shared<std::vector<std::string>>();
    commands
        .add({"help", "help", "show the help of a command",
              "  kvwitness help run\n"
              "  kvwitness help trace dump",
              false},
             [words, &commands](Session& session) { return print_help(*words, commands, session); })
        .positionals("COMMAND", *words, "Such as run, or trace dump", false);
}

Result<int> print_version(Session& session) {
    if (!session.common.json) {
        session.out.write(fmt::format("kvwitness {}\n", kVersion));
        return 0;
    }
    Json object = object_of("version");
    object["version"] = kVersion;
    object["trace_format"] = fmt::format("{}.{}", kTraceMajor, kTraceMinor);
    object["model_formats"] = {"gguf v2", "gguf v3"};
    object["architectures"] = {"llama"};
    object["numerics"] = kNumericsVersion;
    object["isa"] = available_isas();
    object["isa_auto"] = best_kernels().isa;
    object["devices"] = {"cpu", "sim"};
    object["build"] = {{"type", kBuildType}, {"compiler", kCompiler}};
    object["network"] = "none";
    session.out.object(object);
    return 0;
}

}  // namespace kvw::cli
