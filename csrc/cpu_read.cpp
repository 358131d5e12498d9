// Reads a file and its checksum at once: each piece is counted while it is still in the cache that the kernel has copied
// it to. Of a larger read the checksum would have to fetch every byte from memory again.
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cpu_kernels.h"

namespace zero {
namespace {

constexpr int64_t kPiece = 1 << 17;  // well inside a core's second cache; smaller ones cost more calls than they save

}  // namespace

int64_t crc32_read(int file, int64_t offset, void* target, int64_t nbytes, uint32_t& value) {
  char* to = static_cast<char*>(target);
  int64_t done = 0;
  while (done < nbytes) {
    const auto count = static_cast<size_t>(std::min(nbytes - done, kPiece));
    const ssize_t got = pread(file, to + done, count, offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -errno;
    if (got == 0) break;
    value = active().crc32(value, to + done, got);
    done += got;
  }
  return done;
}

}  // namespace zero
