// The pools of aio.h: what is written is read back, a file that is cut says where it ends, requests that are dropped or
// still wait when the pool goes are done all the same.
#include "test_aio.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../aio.h"
#include "support.h"

namespace test {
namespace {

constexpr int64_t kBlockBytes = 512;

// A file without a name.
class Temporary {
 public:
  Temporary() {
    char path[] = "/tmp/zero-test-XXXXXX";
    fd_ = mkstemp(path);
    if (fd_ < 0) throw Failure{"mkstemp: " + std::string(std::strerror(errno))};
    unlink(path);
  }
  ~Temporary() { close(fd_); }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

void need(bool right, const std::string& what) {
  if (!right) throw Failure{"files: " + what};
}

void need_outcome(zero::AioRequest& request, int error, int64_t reached, const std::string& what) {
  while (!request.wait(100)) {
  }
  const zero::AioOutcome found = request.outcome();
  need(found.error == error && found.reached == reached,
       what + ": got error " + std::to_string(found.error) + " at " + std::to_string(found.reached) + ", wanted " +
           std::to_string(error) + " at " + std::to_string(reached));
}

std::vector<char> noise(int64_t nbytes, char seed) {
  std::vector<char> bytes(static_cast<size_t>(nbytes));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(seed + i * 7 + i / 251);
  return bytes;
}

zero::AioSpan span(bool write, const Temporary& file, std::vector<char>& bytes, int64_t offset) {
  return zero::AioSpan{write, file.fd(), bytes.data(), static_cast<int64_t>(bytes.size()), offset, 1};
}

int64_t test_sizes(zero::AioPool& pool) {
  int64_t count = 0;
  Temporary file;
  const int64_t sizes[] = {0, 1, kBlockBytes - 1, kBlockBytes, kBlockBytes + 1, 40 * kBlockBytes + 3};
  for (const int64_t nbytes : sizes) {
    std::vector<char> data = noise(nbytes, 3), back(data.size());
    need_outcome(*pool.submit(span(true, file, data, 5)), 0, nbytes, "write");
    need_outcome(*pool.submit(span(false, file, back, 5)), 0, nbytes, "read");
    need(data == back, std::to_string(nbytes) + " bytes differ");
    ++count;
  }
  return count;
}

int64_t test_cuts(zero::AioPool& pool) {
  int64_t count = 0;
  std::vector<char> data = noise(9 * kBlockBytes, 1), back(data.size());
  for (const int64_t end : {int64_t{0}, kBlockBytes, 2 * kBlockBytes + 17, 9 * kBlockBytes - 1}) {
    Temporary file;
    need_outcome(*pool.submit(span(true, file, data, 0)), 0, 9 * kBlockBytes, "write");
    need(ftruncate(file.fd(), end) == 0, "ftruncate");
    need_outcome(*pool.submit(span(false, file, back, 0)), zero::kAioShort, end, "read of a file that was cut");
    ++count;
  }
  const zero::AioSpan closed{false, -1, data.data(), static_cast<int64_t>(data.size()), 0, 1};
  need_outcome(*pool.submit(closed), EBADF, 0, "read of no file");
  return count + 1;
}

int64_t test_many(const std::string& name, int workers, bool uring) {
  constexpr int64_t kMany = 200;
  Temporary file;
  std::vector<std::vector<char>> data;
  for (int64_t i = 0; i < kMany; ++i) data.push_back(noise(1000, static_cast<char>(i)));
  {
    zero::AioPool pool(workers, 3, kBlockBytes, uring);
    for (int64_t i = 0; i < kMany; ++i) pool.submit(span(true, file, data[static_cast<size_t>(i)], i * 1000));
  }
  std::vector<char> back(1000);
  for (int64_t i = 0; i < kMany; ++i) {
    need(pread(file.fd(), back.data(), 1000, i * 1000) == 1000, "pread");
    need(back == data[static_cast<size_t>(i)], name + ": dropped request " + std::to_string(i) + " was not done");
  }
  return kMany;
}

}  // namespace

int64_t test_files() {
  int64_t count = 0;
  for (const bool uring : {false, true}) {
    const std::string name = uring ? "io_uring" : "threads";
    for (const int workers : {1, 4}) {
      std::unique_ptr<zero::AioPool> pool;
      try {
        pool = std::make_unique<zero::AioPool>(workers, 3, kBlockBytes, uring);
      } catch (const std::runtime_error& error) {
        std::printf("%s does not run here: %s\n", name.c_str(), error.what());
        break;
      }
      count += test_sizes(*pool) + test_cuts(*pool) + test_many(name, workers, uring);
      pool->close();
      pool->close();
    }
  }
  return count;
}

}  // namespace test
