// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"example.com/gpu-agent/internal/usage"
)

// index describes the content of a packed segment. It is in the extra field of the gzip header
// (RFC 1952, 2.3.1.1), which every other reader ignores.
type index struct {
	// Last is the number of the last segment that was joined to this one; the segment's own
	// number if none was.
	Last uint64 `json:"last"`
	// Damaged is true if the segment cannot be read to its end.
	Damaged bool `json:"damaged,omitempty"`
	usage.Weights
}

const (
	// mark is the ID of our part of the extra field. plainHeader is the length in bytes of a
	// gzip header without extra fields.
	mark        = "GA"
	plainHeader = 10
	extraFlag   = 4
	// mostIndex bounds an index, in bytes: an extra field holds 65535.
	mostIndex = 60_000
)

// header returns a gzip header with the index. If there are too many owners for it, the index
// has those with the most bytes. Lines of the other owners are then never trimmed.
func (x index) header() ([]byte, error) {
	text, err := json.Marshal(x)
	if err == nil && len(text) > mostIndex {
		owners := slices.SortedFunc(maps.Keys(x.Of), func(a, b usage.Owner) int {
			return cmp.Or(cmp.Compare(x.Of[b].Bytes, x.Of[a].Bytes), a.Compare(b))
		})
		all := x.Of
		for n := len(owners); err == nil && len(text) > mostIndex; text, err = json.Marshal(x) {
			x.Of = map[usage.Owner]usage.Weight{}
			n = min(n-1, n*mostIndex/len(text))
			for _, o := range owners[:n] {
				x.Of[o] = all[o]
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("write a segment's index: %w", err)
	}
	const best, unknown = 2, 255 // compression, system
	out := []byte{0x1f, 0x8b, 8, extraFlag, 0, 0, 0, 0, best, unknown}
	out = binary.LittleEndian.AppendUint16(out, uint16(len(mark)+2+len(text)))
	out = append(out, mark...)
	out = binary.LittleEndian.AppendUint16(out, uint16(len(text)))
	return append(out, text...), nil
}

// indexOf returns the index in an extra field, or nil if there is none.
func indexOf(extra []byte) *index {
	for len(extra) >= len(mark)+2 {
		name, size := string(extra[:2]), int(binary.LittleEndian.Uint16(extra[2:]))
		if extra = extra[4:]; size > len(extra) {
			return nil
		}
		x := new(index)
		if name == mark && json.Unmarshal(extra[:size], x) == nil && x.Last > 0 {
			return x
		}
		extra = extra[size:]
	}
	return nil
}

// info is a packed segment with its size in bytes and its index.
type info struct {
	segment
	size int64
	index
}

// infos returns the packed segments. It removes those that were already joined to an earlier
// one.
func (s *Store) infos() (out []info, err error) {
	all, err := list(s.root.FS())
	if err != nil {
		return nil, err
	}
	covered := uint64(0)
	for _, g := range all.segments {
		if !g.packed {
			continue
		}
		if g.n <= covered { // its removal was interrupted
			if err := s.root.Remove(g.name); err != nil {
				return nil, err
			}
			continue
		}
		i := info{segment: g}
		x, err := s.index(g)
		if err != nil {
			return nil, err
		}
		i.index = *x
		stat, err := s.root.Lstat(g.name)
		if err != nil {
			return nil, err
		}
		i.size, covered = stat.Size(), x.Last
		out = append(out, i)
	}
	return out, nil
}

// index reads a segment's index. If an older agent packed the segment, it has none: index reads
// the segment once and adds one, and leaves its compressed bytes as they are.
func (s *Store) index(g segment) (*index, error) {
	f, err := s.root.Open(g.name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// A gzip reader would take 40 KiB, so the header is read by hand.
	head := make([]byte, plainHeader+2)
	if n, err := io.ReadFull(f, head); err == nil && head[3]&extraFlag != 0 {
		extra := make([]byte, binary.LittleEndian.Uint16(head[plainHeader:]))
		if _, err := io.ReadFull(f, extra); err == nil {
			if x := indexOf(extra); x != nil {
				return x, nil
			}
		}
	} else if n == 0 && err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	z, err := gzip.NewReader(f)
	if err != nil { // nothing of it can be read
		return &index{Last: g.n, Damaged: true}, nil
	}
	x := &index{Last: g.n}
	c := usage.NewCopier(io.Discard)
	x.Damaged = c.Copy(z, usage.Omit{}) != nil
	if x.Weights, _, err = c.Close(); err != nil {
		return nil, err
	}
	packed, err := s.root.ReadFile(g.name)
	if err != nil {
		return nil, err
	}
	if len(packed) < plainHeader || packed[3] != 0 { // not written by an agent: it is read again each time
		return x, nil
	}
	return x, s.put(g.n, *x, packed[plainHeader:])
}

// put writes a packed segment: a header with the index, and then rest.
func (s *Store) put(n uint64, x index, rest []byte) (err error) {
	header, err := x.header()
	if err != nil {
		return err
	}
	temp := "." + name(n, tempSuffix)
	to, err := s.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, fileMode)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = s.root.Remove(temp)
		}
	}()
	_, err = to.Write(header)
	if err == nil {
		_, err = to.Write(rest)
	}
	if err := errors.Join(err, to.Sync(), to.Close()); err != nil {
		return err
	}
	return s.root.Rename(temp, name(n, packedSuffix))
}

// packer makes a packed segment.
type packer struct {
	*usage.Copier
	packed bytes.Buffer
	z      *gzip.Writer
}

func newPacker() (*packer, error) {
	c := &packer{}
	var err error
	if c.z, err = gzip.NewWriterLevel(&c.packed, gzip.BestCompression); err != nil {
		return nil, err
	}
	c.Copier = usage.NewCopier(c.z)
	return c, nil
}

// close returns the packed segment after its header, its weights, and what was left out of it.
func (c *packer) close() ([]byte, usage.Weights, usage.Dropped, error) {
	w, dropped, err := c.Copier.Close()
	if err = errors.Join(err, c.z.Close()); err != nil {
		return nil, w, nil, err
	}
	return c.packed.Bytes()[plainHeader:], w, dropped, nil
}
