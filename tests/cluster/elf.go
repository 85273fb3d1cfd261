// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// elfKind is what makes a library fit a program.
type elfKind struct {
	class   elf.Class
	machine elf.Machine
}

// elfInfo is what the dynamic loader reads of a file.
type elfInfo struct {
	kind        elfKind
	interpreter string   // the dynamic loader; "" for a library
	needed      []string // sonames
	searched    []string // directories from DT_RUNPATH, or else DT_RPATH
}

// readELF returns false for a file that is no ELF file.
func readELF(file string) (elfInfo, bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return elfInfo{}, false, err
	}
	defer f.Close()
	magic := make([]byte, len(elf.ELFMAG))
	if _, err := io.ReadFull(f, magic); err != nil || string(magic) != elf.ELFMAG {
		return elfInfo{}, false, nil
	}
	e, err := elf.NewFile(f)
	if err != nil {
		return elfInfo{}, false, fmt.Errorf("read %s: %w", file, err)
	}
	info := elfInfo{kind: elfKind{e.Class, e.Machine}}
	for _, p := range e.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		b, err := io.ReadAll(p.Open())
		if err != nil {
			return elfInfo{}, false, fmt.Errorf("read the loader's name in %s: %w", file, err)
		}
		info.interpreter = string(bytes.TrimRight(b, "\x00"))
	}
	for _, d := range []struct {
		tag elf.DynTag
		to  *[]string
	}{{elf.DT_NEEDED, &info.needed}, {elf.DT_RPATH, &info.searched}, {elf.DT_RUNPATH, &info.searched}} {
		values, err := e.DynString(d.tag)
		if err != nil {
			return elfInfo{}, false, fmt.Errorf("read the dynamic section of %s: %w", file, err)
		}
		if len(values) > 0 { // a run path overrides an older kind of it
			*d.to = values
		}
	}
	return info, true, nil
}

// libraries returns the dynamic loader and all shared libraries of file,
// directly or indirectly needed, as paths at which the loader finds them on
// this machine; sorted. dirs are searched after a file's own run path. A static
// program and a file that is not ELF need none. A library that only dlopen
// will load is not seen.
func libraries(file string, dirs []string) ([]string, error) {
	found := map[string]bool{}
	queue := []string{file}
	for len(queue) > 0 {
		next := queue[0]
		queue = queue[1:]
		info, ok, err := readELF(next)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		var wanted []string
		if info.interpreter != "" {
			wanted = append(wanted, info.interpreter)
		}
		for _, soname := range info.needed {
			lib, err := findLibrary(soname, next, info, dirs)
			if err != nil {
				return nil, err
			}
			wanted = append(wanted, lib)
		}
		for _, lib := range wanted {
			if !found[lib] {
				found[lib] = true
				queue = append(queue, lib)
			}
		}
	}
	var out []string
	for lib := range found {
		out = append(out, lib)
	}
	slices.Sort(out)
	return out, nil
}

func findLibrary(soname, of string, info elfInfo, dirs []string) (string, error) {
	if strings.Contains(soname, "/") {
		return soname, nil
	}
	var own []string
	for _, paths := range info.searched {
		for _, dir := range strings.Split(paths, ":") {
			origin := filepath.Dir(of)
			own = append(own, strings.NewReplacer("$ORIGIN", origin, "${ORIGIN}", origin).Replace(dir))
		}
	}
	for _, dir := range slices.Concat(own, dirs) {
		lib := filepath.Join(dir, soname)
		if lib, ok, err := readELF(lib); err == nil && ok && lib.kind == info.kind {
			return filepath.Join(dir, soname), nil
		}
	}
	return "", fmt.Errorf("%s needs %s, which is in none of %s", of, soname, strings.Join(slices.Concat(own, dirs), " "))
}

// libraryDirs returns the directories in which this machine's dynamic loader
// looks: those of /etc/ld.so.conf, then the built-in ones.
func libraryDirs() []string {
	dirs := readLoaderConfig("/etc/ld.so.conf", 0)
	dirs = append(dirs, "/lib64", "/usr/lib64", "/lib", "/usr/lib")
	var out []string
	for _, dir := range dirs {
		if st, err := os.Stat(dir); err == nil && st.IsDir() && !slices.Contains(out, dir) {
			out = append(out, dir)
		}
	}
	return out
}

func readLoaderConfig(file string, depth int) []string {
	b, err := os.ReadFile(file)
	if err != nil || depth > 4 { // an include of itself
		return nil
	}
	var out []string
	for _, line := range strings.Split(string(b), "\n") {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		switch {
		case len(fields) == 2 && fields[0] == "include":
			pattern := fields[1]
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(filepath.Dir(file), pattern)
			}
			files, err := filepath.Glob(pattern) // sorted
			if err != nil {
				continue // a pattern that is malformed matches nothing
			}
			for _, f := range files {
				out = append(out, readLoaderConfig(f, depth+1)...)
			}
		case len(fields) == 1:
			out = append(out, fields[0])
		}
	}
	return out
}
