// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// deb is a package of Debian's archive: where it lies in it, and the SHA-256 that
// a release of Debian vouches for.
type deb struct {
	pool, sum string
}

const (
	driversPool = "pool/non-free/n/nvidia-graphics-drivers/"
	toolkitPool = "pool/non-free/n/nvidia-cuda-toolkit/"
)

// driver is a real driver: the libraries that a container gets of it.
type driver struct {
	version    string
	cuda, nvml deb
}

// judges are the drivers that Debian's releases have, oldest first.
var judges = []driver{
	{"470.256.02",
		deb{driversPool + "libcuda1_470.256.02-2_amd64.deb", "4a6d2dcd33042c215bd1ae4754504e487c39f56e8b7395f9c879b3e127e23de7"},
		deb{driversPool + "libnvidia-ml1_470.256.02-2_amd64.deb", "535cef1384d34cdb32360c07275d55740905de78ebe8d3b2ef01caae2a37d3f4"}},
	{"525.147.05",
		deb{"pool/non-free/n/nvidia-graphics-drivers-tesla/libnvidia-tesla-cuda1_525.147.05-15~deb12u1_amd64.deb", "93dd22409393521d911cfebeedf59201244d1196464f36a2631dceb3f99f2097"},
		deb{"pool/non-free/n/nvidia-graphics-drivers-tesla/libnvidia-tesla-ml1_525.147.05-15~deb12u1_amd64.deb", "187321f507c01d4fa63bf7a66f6ba93b688772c087b64e063654ff144b114da9"}},
	{"535.261.03",
		deb{driversPool + "libcuda1_535.261.03-1_amd64.deb", "de1e9ca34164a5983b3f752e6699cf1ad924790f1a843b7d582bab6f99206e1e"},
		deb{driversPool + "libnvidia-ml1_535.261.03-1_amd64.deb", "c729da6ab729309dc3f481fe4d38f04ea03b0793154b0962b60117d2f37d082e"}},
	{"550.163.01",
		deb{driversPool + "libcuda1_550.163.01-2_amd64.deb", "8feff97aac61d6f27ded96a3c25b9e68025a680476e6072ff7eaf10623509135"},
		deb{driversPool + "libnvidia-ml1_550.163.01-2_amd64.deb", "01c1b67d511d7f52c6aa60e14ed56a8eb725d5dc85784a08214d6cb0f4fd1f89"}},
	{"555.58.02",
		deb{driversPool + "libcuda1_555.58.02-4_amd64.deb", "3f2c5cb91c88b5f6ce05c81de553ce3ff72e0772dcd07c7e0a85b8cd408b4457"},
		deb{driversPool + "libnvidia-ml1_555.58.02-4_amd64.deb", "b731d4ae7f68bd940e6f4c7f072a17b58f38685f875087e61f29c1f23dc7972b"}},
}

// cudaRuntime is a CUDA runtime library, by the version of CUDA.
type cudaRuntime struct {
	version string
	deb     deb
}

var runtimes = []cudaRuntime{
	{"11.8", deb{toolkitPool + "libcudart11.0_11.8.89~11.8.0-5~deb12u1_amd64.deb", "6c0e4052f5cb7ffcd70989110ed51af7c506ff7dc60d49900ae316ac9abaee29"}},
	{"12.4", deb{toolkitPool + "libcudart12_12.4.127~12.4.1-2_amd64.deb", "361b3721cf84bf068e111ff013c819de61cb475268b0d38db99839471f1b4130"}},
	{"12.5", deb{toolkitPool + "libcudart12_12.5.39~12.5.0-2+b1_amd64.deb", "ff7331ef27a41454f6bf8576559c7b5b2038654dc7f15e2da7d4578a5db82a85"}},
}

// errHash is a file of the archive that is not what it was.
var errHash = errors.New("not the file that was pinned")

// library returns the path of a library of a package: the one file whose name
// begins with prefix. The package is downloaded where the cache lacks it.
func (d deb) library(ctx context.Context, prefix string) (string, error) {
	tree, err := d.tree(ctx)
	if err != nil {
		return "", err
	}
	var found []string
	err = filepath.WalkDir(tree, func(file string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && strings.HasPrefix(e.Name(), prefix) {
			found = append(found, file)
		}
		return err
	})
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("want one file %s* in %s, have %q", prefix, d.name(), found)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

func (d deb) name() string { return path.Base(d.pool) }

// tree returns the folder that a package is unpacked in, below the cache.
func (d deb) tree(ctx context.Context) (string, error) {
	cache, err := emulib.Cache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "drivers")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	tree := filepath.Join(dir, d.sum[:16])
	lock, err := os.OpenFile(tree+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if _, err := os.Stat(tree); err == nil {
		return tree, nil
	}
	work, err := os.MkdirTemp(dir, "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	file := filepath.Join(work, d.name())
	if err := d.download(ctx, file); err != nil {
		return "", fmt.Errorf("download %s from Debian's archive: %w", d.name(), err)
	}
	fresh := filepath.Join(work, "tree")
	if out, err := exec.CommandContext(ctx, "dpkg", "-x", file, fresh).CombinedOutput(); err != nil {
		return "", fmt.Errorf("dpkg -x %s: %w\n%s", d.name(), err, out)
	}
	return tree, os.Rename(fresh, tree)
}

// download has apt fetch the package from where this machine has its own packages
// from. Nothing of the machine's apt is changed, and its lists are not needed.
func (d deb) download(ctx context.Context, file string) error {
	const helper = "/usr/lib/apt/apt-helper"
	if _, err := os.Stat(helper); err != nil {
		return fmt.Errorf("this machine has no apt: %w", err)
	}
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").Output()
	if err != nil {
		return fmt.Errorf("ask apt for its sources: %w", err)
	}
	sources := strings.Fields(string(out))
	slices.Sort(sources)
	var errs []error
	for _, source := range slices.Compact(sources) {
		cmd := exec.CommandContext(ctx, helper, "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20",
			"download-file", strings.TrimSuffix(source, "/")+"/"+d.pool, file, "SHA256:"+d.sum)
		cmd.Env = append(os.Environ(), "LC_ALL=C")
		said, failed := cmd.CombinedOutput()
		if failed == nil {
			return nil
		}
		if bytes.Contains(said, []byte("Hash Sum mismatch")) {
			return errHash
		}
		errs = append(errs, fmt.Errorf("%w: %s", failed, why(string(said))))
	}
	if len(errs) == 0 {
		return errors.New("apt has no source of packages")
	}
	return errors.Join(errs...)
}

// why is apt's own word for a failure, without the address that it tried.
func why(said string) string {
	for line := range strings.Lines(said) {
		if reason, ok := strings.CutPrefix(line, "E: "); ok {
			if _, after, ok := strings.Cut(reason, "  "); ok {
				reason = after
			}
			return strings.TrimSpace(reason)
		}
	}
	return "apt says nothing of it"
}
