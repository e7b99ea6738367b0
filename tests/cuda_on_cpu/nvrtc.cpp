// NVIDIA's compiler for kernels, by g++: a program becomes a shared library for the processor.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <sys/file.h>
#include <unistd.h>
#include <vector>

// As in NVIDIA's nvrtc.h, which only comes with the compiler itself.
typedef void* nvrtcProgram;
enum nvrtcResult { NVRTC_SUCCESS = 0, NVRTC_ERROR_INVALID_INPUT = 3, NVRTC_ERROR_COMPILATION = 6 };
extern "C" nvrtcResult nvrtcVersion(int* major, int* minor);

namespace {
const char PTX[] = "// CPU in place of a GPU\n";

struct Program {
    std::string source, log, image;
};

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string quoted(const std::string& text) { return "'" + std::regex_replace(text, std::regex("'"), "'\\''") + "'"; }

// Where this library is, and with it device_code.hpp.
std::string folder() {
    Dl_info info;
    dladdr((void*)&nvrtcVersion, &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// What g++ does not know, in words that it does.
std::string translated(std::string text) {
    const auto flags = std::regex::ECMAScript | std::regex::optimize;
    text = std::regex_replace(
        text, std::regex(R"re(asm\s+volatile\s*\(\s*"mov\.u64 %0, %%globaltimer;"\s*:\s*"=l"\((\w+)\)\s*\))re", flags),
        "$1 = standin::global_timer()");
    return std::regex_replace(text, std::regex(R"(extern\s+__shared__\s+([\w:<> ]+?)\s+(\w+)\[\])", flags),
                              "$1* $2 = standin_shared<$1*>()");
}

const char FLAGS[] = " -std=c++17 -O1 -w -fPIC -ffp-contract=off -fwrapv -fno-strict-aliasing -DSTANDIN_GLOBAL= ";

bool run(const std::string& command, const std::string& log) {
    return !std::system((command + " >" + quoted(log) + " 2>&1").c_str());
}

// Ranks ask for the same kernels at the same time: one compiles, and the others wait for what it has made.
struct Turn {
    explicit Turn(const std::string& made) : file(open((made + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600)) {
        flock(file, LOCK_EX);
    }
    ~Turn() { close(file); }
    const int file;
};

// Whether a line includes a header, or is empty.
bool includes(const std::string& line) {
    const auto first = line.find_first_not_of(" \t\r");
    return first == std::string::npos || line.compare(first, 8, "#include") == 0;
}

// The header of the programs that begin with these lines. It is compiled once: CuPy's own take a second.
std::string header(const std::string& lines, const std::string& flags, const std::string& work) {
    const std::string name = "/head-" + std::to_string(std::hash<std::string>()(lines + flags)) + ".hpp";
    const std::string made = folder() + name, mine = work + name;
    const Turn turn(made);
    if (access((made + ".gch").c_str(), R_OK)) {
        write(mine, "#include \"device_code.hpp\"\n" + lines);
        const std::string command = "g++ -x c++-header" + flags + " " + quoted(mine) + " -o " + quoted(mine + ".gch");
        const bool is_right = run(command, "/dev/null");
        std::rename(mine.c_str(), made.c_str());
        if (is_right) std::rename((mine + ".gch").c_str(), (made + ".gch").c_str());
    }
    return made;
}

// What is loaded as a kernel's machine code.
std::string image_of(const std::string& file) {
    const std::string library = read(file);
    char size[24];
    std::snprintf(size, sizeof size, "STANDIN%016zu", library.size());
    return size + library;
}

// Compile; the log is what g++ says.
bool compile(Program& program, const std::vector<std::string>& options) {
    std::string flags = FLAGS + ("-I" + quoted(folder()));
    for (const auto& each : options) {
        if (each.rfind("-I", 0) == 0 || each.rfind("-D", 0) == 0) flags += " " + quoted(each);
        if (each.rfind("--include-path=", 0) == 0) flags += " " + quoted("-I" + each.substr(15));
    }
    const std::string made = folder() + "/kernel-" + std::to_string(std::hash<std::string>()(program.source + flags));
    const Turn turn(made);
    if (!access(made.c_str(), R_OK)) {
        program.image = image_of(made);
        return true;
    }
    std::string work = folder() + "/work-XXXXXX";
    if (!mkdtemp(&work[0])) return false;
    const std::string base = work + "/kernel", log = work + "/log";
    std::istringstream source(translated(program.source));
    std::string head, body, own, line;
    while (std::getline(source, line)) {
        (body.empty() && includes(line) ? head : body) += line + "\n";
        if (!includes(line)) own += line + "\n";
    }
    // The kernels' names, which macros may make: no header makes any.
    write(base + ".cpp", own);
    const std::string names_only = "g++ -E -P -D__global__=KERNEL_IS -D'__launch_bounds__(...)='";
    bool is_right = run(names_only + flags + " " + quoted(base + ".cpp") + " -o " + quoted(base + ".ii"), log);
    const std::string text = read(base + ".ii");
    const std::string has_barriers = own.find("__sync") == std::string::npos ? "false" : "true";
    const std::regex kernel(R"(KERNEL_IS\s+void\s+(\w+)\s*\()");
    std::set<std::string> names;
    for (std::sregex_iterator each(text.begin(), text.end(), kernel), end; each != end; ++each)
        names.insert((*each)[1]);
    for (const auto& name : names)
        body += "\nextern \"C\" const standin::Kernel standin_kernel_" + name +
                ";\nconst standin::Kernel standin_kernel_" + name + " = standin::Entry<&" + name + ", " + has_barriers +
                ">::made;\n";
    write(base + ".cpp", body);
    // Of the usual libraries only these: to look into the others takes as long as half of the compiler's work.
    const std::string whole = "g++ -shared -nodefaultlibs" + flags + " -include " + quoted(header(head, flags, work));
    const std::string made_of = " " + quoted(base + ".cpp") + " -o " + quoted(base + ".so") + " -lstdc++ -lgcc";
    is_right = is_right && run(whole + made_of, log);
    program.log = read(log);
    if (is_right) {
        std::rename((base + ".so").c_str(), made.c_str());
        program.image = image_of(made);
    } else if (const char* keep = std::getenv("STANDIN_KEEP")) {
        write(std::string(keep) + "/" + std::to_string(getpid()) + "-" + std::to_string(std::rand()) + ".cu",
              program.source + "\n/*\n" + program.log + "\n" + flags + "*/\n");
    }
    std::filesystem::remove_all(work);
    return is_right;
}
}  // namespace

extern "C" {
nvrtcResult nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, NVRTC_SUCCESS; }
const char* nvrtcGetErrorString(nvrtcResult result) { return result ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }
nvrtcResult nvrtcGetNumSupportedArchs(int* count) { return *count = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetSupportedArchs(int* archs) { return *archs = 90, NVRTC_SUCCESS; }
nvrtcResult nvrtcCreateProgram(nvrtcProgram* made, const char* source, const char*, int headers, const char* const*,
                               const char* const*) {
    if (headers) return NVRTC_ERROR_INVALID_INPUT;
    *made = (nvrtcProgram) new Program{source, "", ""};
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) { return delete (Program*)*program, NVRTC_SUCCESS; }
nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
    return compile(*(Program*)program, {options, options + count}) ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* size) {
    return *size = ((Program*)program)->image.size(), NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* image) {
    const std::string& made = ((Program*)program)->image;
    std::memcpy(image, made.data(), made.size());
    return NVRTC_SUCCESS;
}
// CuPy asks for this text to tell compilers apart; it runs the other.
nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t* size) { return *size = sizeof PTX, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTX(nvrtcProgram, char* text) { return std::memcpy(text, PTX, sizeof PTX), NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* size) {
    return *size = ((Program*)program)->log.size() + 1, NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
    std::strcpy(log, ((Program*)program)->log.c_str());
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcAddNameExpression(nvrtcProgram, const char*) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcGetLoweredName(nvrtcProgram, const char*, const char**) { return NVRTC_ERROR_INVALID_INPUT; }
}
