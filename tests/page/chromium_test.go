// SPDX-License-Identifier: Apache-2.0

package page

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// packages is what the tests need of Debian's, beside what these depend on. The
// headless shell needs no desktop's libraries, which the browser itself does.
// Of the typefaces DejaVu's letters are the widest that are in wide use.
var packages = []string{"chromium-headless-shell", "fonts-inter", "fonts-jetbrains-mono", "fonts-dejavu-core"}

// chromium is an unpacked browser.
type chromium struct {
	tree    string
	program string
	env     []string
}

// made is the file below the tree that says what it was made from.
const made = "packages"

// install returns the browser from the cache, where it is put if it is not
// there, or does not run: a cache can be older than the machine.
func install(ctx context.Context, say func(format string, args ...any)) (*chromium, error) {
	cache, err := emulib.Cache()
	if err != nil {
		return nil, err
	}
	tree := filepath.Join(cache, "chromium")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	// Two runs at a time install one browser.
	lock, err := os.OpenFile(tree+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	c, err := find(ctx, tree)
	if err == nil {
		return c, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		say("the browser in the cache does not run, and is unpacked anew: %v", err)
	}
	if err := unpack(ctx, cache, tree, say); err != nil {
		return nil, fmt.Errorf("get a browser from Debian's archive: %w", err)
	}
	return find(ctx, tree)
}

// find makes sure that the browser below tree runs.
func find(ctx context.Context, tree string) (*chromium, error) {
	c := &chromium{tree: tree, program: filepath.Join(tree, "usr/lib/chromium/chromium-headless-shell")}
	from, err := os.ReadFile(filepath.Join(tree, made))
	if err != nil {
		return nil, err
	}
	if string(from) != strings.Join(packages, " ") {
		return nil, fmt.Errorf("it was made from %s", from)
	}
	dirs := map[string]bool{}
	var libs []string
	err = filepath.WalkDir(filepath.Join(tree, "usr/lib"), func(file string, d fs.DirEntry, err error) error {
		if dir := filepath.Dir(file); err == nil && strings.Contains(d.Name(), ".so") && !dirs[dir] && dir != filepath.Dir(c.program) {
			dirs[dir] = true
			libs = append(libs, dir)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, v := range os.Environ() {
		switch name, _, _ := strings.Cut(v, "="); name {
		case "LD_LIBRARY_PATH", "FONTCONFIG_FILE", "DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "LANG", "LC_ALL", "TZ":
		default:
			c.env = append(c.env, v)
		}
	}
	c.env = append(c.env, "LD_LIBRARY_PATH="+strings.Join(libs, ":"), "LANG=C.UTF-8", "TZ=UTC")
	cmd := exec.CommandContext(ctx, c.program, "--version")
	cmd.Env = c.env
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s --version: %w\n%s", c.program, err, out)
	}
	return c, nil
}

// fontsConf lets the browser see the unpacked typefaces alone, so that a page
// looks the same on every machine, and one of them as the system's.
func (c *chromium) fontsConf(system string) string {
	alias := func(from, to string) string {
		return fmt.Sprintf("<match target=\"pattern\"><test name=\"family\"><string>%s</string></test><edit name=\"family\" mode=\"assign\" binding=\"strong\"><string>%s</string></edit></match>\n", from, to)
	}
	return "<?xml version=\"1.0\"?>\n<!DOCTYPE fontconfig SYSTEM \"fonts.dtd\">\n<fontconfig>\n<dir>" + c.tree + "/usr/share/fonts</dir>\n<cachedir>" + c.tree + "/fontcache</cachedir>\n" +
		alias("system-ui", system) + alias("sans", system) + alias("sans-serif", system) + alias("monospace", "JetBrains Mono") + "</fontconfig>\n"
}

// unpack downloads the packages, and those that they need and this machine
// lacks, and unpacks them as tree. apt is given a cache of its own, and lists of
// its own where the machine's do not serve, so that it writes nothing elsewhere.
func unpack(ctx context.Context, cache, tree string, say func(format string, args ...any)) error {
	for _, tool := range []string{"apt-get", "dpkg"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("there is no %s: the browser comes from Debian's archive", tool)
		}
	}
	work, err := os.MkdirTemp(cache, "chromium-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	options := []string{"-q", "-o", "APT::Sandbox::User=root", "-o", "Dir::Cache=" + filepath.Join(cache, "apt", "cache"), "-o", "Debug::NoLocking=1"}
	apt := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "apt-get", append(options[:len(options):len(options)], args...)...)
		cmd.Dir, cmd.Env = work, append(os.Environ(), "LC_ALL=C")
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("apt-get %s: %w\n%.4000s", args[0], err, out)
		}
		return string(out), err
	}
	// A simulated installation names what would be needed.
	get := func() error {
		out, err := apt(append([]string{"--simulate", "--no-install-recommends", "install"}, packages...)...)
		if err != nil {
			return err
		}
		// What is installed here is not in the simulation: of the libraries that is
		// well, but the packages themselves are taken all the same.
		needed := closure(out)
		for _, p := range packages {
			if !slices.ContainsFunc(needed, func(n string) bool { return strings.HasPrefix(n, p+"=") }) {
				needed = append(needed, p)
			}
		}
		_, err = apt(append([]string{"download"}, needed...)...)
		return err
	}
	say("downloading Chromium's headless shell and three typefaces from Debian's archive, about 90 MB")
	for _, dir := range []string{"cache", "lists"} {
		if err := os.MkdirAll(filepath.Join(cache, "apt", dir, "partial"), 0o755); err != nil {
			return err
		}
	}
	if first := get(); first != nil {
		say("the machine's package lists do not serve; fetching lists of our own, about 20 MB")
		options = append(options, "-o", "Dir::State::Lists="+filepath.Join(cache, "apt", "lists"))
		if _, err := apt("update"); err != nil {
			return errors.Join(first, err)
		}
		if err := get(); err != nil {
			return err
		}
	}
	debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil {
		return err
	}
	var size int64
	fresh := filepath.Join(work, "tree")
	for _, deb := range debs {
		info, err := os.Stat(deb)
		if err != nil {
			return err
		}
		size += info.Size()
		if out, err := exec.CommandContext(ctx, "dpkg", "-x", deb, fresh).CombinedOutput(); err != nil {
			return fmt.Errorf("dpkg -x %s: %w\n%s", filepath.Base(deb), err, out)
		}
	}
	if err := os.WriteFile(filepath.Join(fresh, made), []byte(strings.Join(packages, " ")), 0o644); err != nil {
		return err
	}
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	if err := os.Rename(fresh, tree); err != nil {
		return err
	}
	say("unpacked %d packages of %d MB into %s", len(debs), size/1e6, tree)
	return nil
}

var installs = regexp.MustCompile(`(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+) `)

// closure reads what `apt-get --simulate install` would install, as
// package=version.
func closure(out string) []string {
	var list []string
	for _, m := range installs.FindAllStringSubmatch(out, -1) {
		list = append(list, m[1]+"="+m[2])
	}
	return list
}
