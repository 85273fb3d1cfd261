// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// Link returns a copy of a library of ours against which programs can be linked as against the
// driver's library, the file real: every function of the driver's is among its names.
//
// A linker reads names by a file's section headers. It takes those of a library on its command
// line, but not those of a library that this one needs. The loader never reads section headers: it
// finds names by the hash table, first in our library and then in the one that it needs.
//
// So the copy has a second symbol table, behind the loaded part of the file, and its section
// headers name that table and not the first one. For a process nothing changes, and calls of
// functions that are not ours go to the driver directly.
func Link(library []byte, real string) ([]byte, error) {
	has, err := exported(real)
	if err != nil {
		return nil, fmt.Errorf("read the driver's %s: %w: %w", real, gpu.ErrDriver, err)
	}
	maps.DeleteFunc(has, func(_ string, s elf.Symbol) bool { return elf.ST_TYPE(s.Info) != elf.STT_FUNC })
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		return nil, err
	}
	if f.Class != elf.ELFCLASS64 || f.Data != elf.ELFDATA2LSB {
		return nil, fmt.Errorf("the library is %v, %v: %w", f.Class, f.Data, gpu.ErrInvalid)
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	code := slices.IndexFunc(f.Sections, func(s *elf.Section) bool { return s.Name == ".text" })
	table := slices.IndexFunc(f.Sections, func(s *elf.Section) bool { return s.Type == elf.SHT_DYNSYM })
	if code < 0 || table < 0 {
		return nil, fmt.Errorf("the library has no code or no symbols: %w", gpu.ErrInvalid)
	}
	ours := map[string]elf.Symbol{}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			ours[s.Name] = s
		}
	}
	texts, entries := []byte{0}, make([]byte, elf.Sym64Size)
	for _, name := range slices.Sorted(maps.Keys(has)) {
		// A tracer that reads the table for addresses finds those of our own functions.
		s := elf.Sym64{
			Name: uint32(len(texts)), Info: elf.ST_INFO(elf.STB_GLOBAL, elf.STT_FUNC),
			Shndx: uint16(code), Value: f.Sections[code].Addr,
		}
		if own, yes := ours[name]; yes {
			s.Shndx, s.Value, s.Size = uint16(own.Section), own.Value, own.Size
		}
		texts = append(append(texts, name...), 0)
		if entries, err = binary.Append(entries, binary.LittleEndian, s); err != nil {
			return nil, err
		}
	}
	return withTable(library, table, entries, texts)
}

// withTable appends a symbol table and its texts to a library, and section headers that make it the
// table of dynamic symbols. table is the index of the old table's header.
func withTable(library []byte, table int, entries, texts []byte) ([]byte, error) {
	var head elf.Header64
	if _, err := binary.Decode(library, binary.LittleEndian, &head); err != nil {
		return nil, err
	}
	headers := make([]elf.Section64, head.Shnum)
	if _, err := binary.Decode(library[head.Shoff:], binary.LittleEndian, headers); err != nil {
		return nil, err
	}
	out := bytes.Clone(library)
	add := func(data []byte) (at uint64) {
		out = append(out, make([]byte, -len(out)&7)...)
		at = uint64(len(out))
		out = append(out, data...)
		return at
	}
	names := headers[headers[table].Link]
	for i := range headers {
		switch elf.SectionType(headers[i].Type) {
		case elf.SHT_GNU_VERSYM, elf.SHT_GNU_VERNEED: // they belong to the loader's table
			headers[i].Type = uint32(elf.SHT_PROGBITS)
		}
	}
	h := &headers[table]
	h.Flags, h.Addr, h.Off, h.Size, h.Link, h.Info = 0, 0, add(entries), uint64(len(entries)), uint32(len(headers)), 1
	names.Flags, names.Addr, names.Off, names.Size = 0, 0, add(texts), uint64(len(texts))
	headers = append(headers, names)
	text, err := binary.Append(nil, binary.LittleEndian, headers)
	if err != nil {
		return nil, err
	}
	head.Shoff, head.Shnum = add(text), uint16(len(headers))
	if _, err := binary.Encode(out, binary.LittleEndian, head); err != nil {
		return nil, err
	}
	return out, nil
}
