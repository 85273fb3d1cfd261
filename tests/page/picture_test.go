// SPDX-License-Identifier: Apache-2.0

package page

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/status"
)

// most is how large the README's picture may be, in bytes.
const most = 200 << 10

// TestPicture holds docs/status.png to the page that it shows, and draws it anew
// with -update.
func TestPicture(t *testing.T) {
	file := filepath.Join("..", "..", "docs", "status.png")
	var html strings.Builder
	if err := status.WriteHTML(&html, rich(t), noon); err != nil {
		t.Fatal(err)
	}
	of := fmt.Sprintf("page %x", sha256.Sum256([]byte(html.String())))
	if *update {
		ctx, b := chrome(t, inter)
		v := view{width: 1180, scale: 1.5}
		tab, err := b.open(ctx, serve(t, rich(t)), v)
		if err != nil {
			t.Fatal(err)
		}
		shot, err := tab.picture(ctx, v, 1084)
		if err != nil {
			t.Fatal(err)
		}
		small, err := palette(shot, of)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, small, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; -update draws it", err)
	}
	if len(data) > most {
		t.Errorf("docs/status.png has %d bytes, want %d at most", len(data), most)
	}
	if _, err := png.Decode(bytes.NewReader(data)); err != nil {
		t.Errorf("docs/status.png: %v", err)
	}
	if !bytes.Contains(data, comment(of)) {
		t.Error("docs/status.png shows another page than the agent does now; go test ./tests/page -run Picture -update draws it anew")
	}
}

// palette writes a picture with 256 colours, which is a third of the size, and
// a comment. The page has few colours; what is between them is the edges of
// letters.
func palette(shot []byte, text string) ([]byte, error) {
	full, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		return nil, err
	}
	area := full.Bounds()
	count := map[color.RGBA]int{}
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(full.At(x, y)).(color.RGBA) }
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			count[at(x, y)]++
		}
	}
	frequent := slices.SortedFunc(maps.Keys(count), func(a, b color.RGBA) int {
		return cmp.Or(cmp.Compare(count[b], count[a]), cmp.Compare(a.R, b.R), cmp.Compare(a.G, b.G), cmp.Compare(a.B, b.B))
	})
	var colors color.Palette
	for _, c := range frequent[:min(len(frequent), 256)] {
		colors = append(colors, c)
	}
	small := image.NewPaletted(area, colors)
	nearest := map[color.RGBA]uint8{}
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			c := at(x, y)
			i, ok := nearest[c]
			if !ok {
				i = uint8(colors.Index(c))
				nearest[c] = i
			}
			small.SetColorIndex(x, y, i)
		}
	}
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, small); err != nil {
		return nil, err
	}
	// The comment stands before the chunk that ends the file, of 12 bytes.
	end := out.Len() - 12
	return slices.Concat(out.Bytes()[:end], comment(text), out.Bytes()[end:]), nil
}

// comment is PNG's chunk of text.
func comment(text string) []byte {
	body := append([]byte("tEXtComment\x00"), text...)
	out := binary.BigEndian.AppendUint32(nil, uint32(len(body)-4))
	out = append(out, body...)
	return binary.BigEndian.AppendUint32(out, crc32.ChecksumIEEE(body))
}
