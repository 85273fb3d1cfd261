// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"path/filepath"

	"example.com/gpu-agent/pkg/gpu"
)

// Fit is like Install, with libraries that are fitted to a driver. The files cuda and nvml are the
// driver's own libraries. A function that the driver lacks cannot be found in ours, and a linker
// finds all functions that the driver has. Programs ask dlsym what a driver can do, and would call
// a function that they find. Fit returns the errors of Install, and one that wraps gpu.ErrDriver if
// it cannot read the driver's libraries.
func Fit(dir, cuda, nvml string) (Kit, error) {
	files, _, err := content()
	if err != nil {
		return Kit{}, err
	}
	for i, real := range []string{cuda, nvml} {
		if files[i].data, err = FitOne(files[i].data, real); err != nil {
			return Kit{}, fmt.Errorf("fit the cap's %s to the driver: %w", files[i].name, err)
		}
	}
	kit, err := install(filepath.Join(dir, "cap"), hashOf(files), files)
	if err != nil {
		return Kit{}, fmt.Errorf("install the cap's library: %w", err)
	}
	return kit, nil
}

// FitOne returns a copy of a library of ours that is fitted to the driver's library, the file real,
// by Hide and by Link.
func FitOne(library []byte, real string) ([]byte, error) {
	out, err := Hide(library, real)
	if err != nil {
		return nil, err
	}
	return Link(out, real)
}

// Hide returns a copy of a library of ours without the names that the driver's library, the file
// real, does not export. The functions stay, and other functions may still call them. Only their
// entries in the symbol table are changed to undefined.
func Hide(library []byte, real string) ([]byte, error) {
	has, err := exported(real)
	if err != nil {
		return nil, fmt.Errorf("read the driver's %s: %w: %w", real, gpu.ErrDriver, err)
	}
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		return nil, err
	}
	table := f.SectionByType(elf.SHT_DYNSYM)
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	used, err := relocated(f)
	if err != nil {
		return nil, err
	}
	out := bytes.Clone(library)
	for i, s := range symbols {
		if _, there := has[s.Name]; there || s.Section == elf.SHN_UNDEF {
			continue
		}
		n := uint64(i + 1) // the table's first entry is no symbol
		if used[n] {
			return nil, fmt.Errorf("the library refers to its own %s by name: %w", s.Name, gpu.ErrInvalid)
		}
		// Clear st_shndx, st_value and st_size of the Elf64_Sym.
		clear(out[table.Offset+n*elf.Sym64Size:][6:elf.Sym64Size])
	}
	return out, nil
}

// exported returns the names that a library defines.
func exported(file string) (map[string]elf.Symbol, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	has := map[string]elf.Symbol{}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_BIND(s.Info) != elf.STB_LOCAL {
			has[s.Name] = s
		}
	}
	return has, nil
}

// relocated returns the symbols whose addresses the loader fills in, by index in the symbol table.
func relocated(f *elf.File) (map[uint64]bool, error) {
	used := map[uint64]bool{}
	for _, s := range f.Sections {
		if s.Type != elf.SHT_RELA {
			continue
		}
		data, err := s.Data()
		if err != nil {
			return nil, err
		}
		for ; len(data) >= 24; data = data[24:] { // Elf64_Rela: r_offset, r_info, r_addend
			used[binary.LittleEndian.Uint64(data[8:])>>32] = true
		}
	}
	return used, nil
}
