// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
)

// nameOf matches a line of cuda_names.h: what cuGetProcAddress takes, the version
// that it came with, its symbol, and that of its twin.
var nameOf = regexp.MustCompile(`(?m)^[VT]\((\w+), (\d+), (\w+)(?:, (\w+))?\)$`)

// since are the symbols of the emulated libcuda, each with the CUDA version that it
// came with.
func since() (map[string]int, error) {
	list, err := sources.ReadFile("c/cuda_names.h")
	if err != nil {
		return nil, err
	}
	first := map[string]int{}
	for _, m := range nameOf.FindAllStringSubmatch(string(list), -1) {
		version, err := strconv.Atoi(m[2])
		if err != nil {
			return nil, fmt.Errorf("cuda_names.h: %w", err)
		}
		for _, symbol := range m[3:] {
			if old, is := first[symbol]; symbol != "" && (!is || version < old) {
				first[symbol] = version
			}
		}
	}
	return first, nil
}

// OfVersion returns a copy of the libcuda that Build made as a driver of some CUDA
// version has it, such as 12040: its table of symbols says of names that came later
// that it does not define them, and cuGetProcAddress does not know them.
func OfVersion(library []byte, cuda int) ([]byte, error) {
	first, err := since()
	if err != nil {
		return nil, err
	}
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		return nil, fmt.Errorf("read libcuda: %w", err)
	}
	table := f.SectionByType(elf.SHT_DYNSYM)
	exported, err := f.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("read libcuda: %w", err)
	}
	out := bytes.Clone(library)
	for i, s := range exported {
		if first[s.Name] > cuda {
			// Of Elf64_Sym: st_shndx, st_value and st_size. The first of a table is none.
			clear(out[table.Offset+uint64(i+1)*elf.Sym64Size:][6:elf.Sym64Size])
		}
	}
	own, err := f.Symbols()
	if err != nil {
		return nil, fmt.Errorf("read libcuda: %w", err)
	}
	for _, s := range own {
		if s.Name == "file_version" {
			in := f.Sections[s.Section]
			binary.LittleEndian.PutUint32(out[in.Offset+s.Value-in.Addr:], uint32(cuda))
			return out, nil
		}
	}
	return nil, fmt.Errorf("libcuda has no file_version: %w", elf.ErrNoSymbols)
}
