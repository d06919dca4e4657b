// SPDX-License-Identifier: Apache-2.0
// What HEV-6 demands before a decoder sees a byte: NAL units, parameter sets and SEI of section 10.4 (ITU-T H.265).
import { Failure } from '../failure.mjs';

const [TRAIL_N, TRAIL_R, IDR_W_RADL, IDR_N_LP, VPS, SPS, PPS, SUFFIX_SEI] = [0, 1, 19, 20, 32, 33, 34, 40];

export function checkStream(bytes, layout, where) {
  const bad = (detail) => new Failure('segment.bitstream', where, detail);
  const units = split(bytes, 3 + 65 * layout.frames, bad);
  const must = (condition, detail) => { if (!condition) throw bad(detail); };
  units.forEach((unit) => must(unit.length > 2 && (unit[0] & 0x80) === 0 && ((unit[0] & 1) << 5 | unit[1] >> 3) === 0
    && (unit[1] & 7) === 1, 'NAL unit header (HEV-5)'));
  const type = (unit) => unit[0] >> 1;
  must(units.length > 3 && [VPS, SPS, PPS].every((t, i) => type(units[i]) === t), 'VPS, SPS and PPS first (HEV-1)');
  checkVps(new Bits(units[0], bad), must);
  checkSps(new Bits(units[1], bad), layout, must);
  checkPps(new Bits(units[2], bad), must);

  let pictures = 0;
  let state = 'between'; // between pictures, or inside one that still lacks its SEI
  let current = -1;
  for (const unit of units.slice(3)) {
    const t = type(unit);
    if (t === SUFFIX_SEI) {
      must(state === 'inside', 'a suffix SEI unit without a picture (HEV-9)');
      checkSei(new Bits(unit, bad).bytes, must);
      state = 'between';
      continue;
    }
    must([TRAIL_N, TRAIL_R, IDR_W_RADL, IDR_N_LP].includes(t), `NAL unit type ${t} (HEV-5)`);
    const first = (unit[2] & 0x80) !== 0; // first_slice_segment_in_pic_flag
    must(first === (state === 'between'), 'a picture is not followed by one suffix SEI unit (HEV-9)');
    must(first || t === current, 'slices of one picture of two types');
    if (first) {
      must(pictures > 0 || t >= IDR_W_RADL, 'the first picture is no IDR picture (HEV-1)');
      pictures++;
    }
    state = 'inside';
    current = t;
  }
  must(state === 'between', 'the last picture has no suffix SEI unit (HEV-9)');
  must(pictures === layout.frames, `expected ${layout.frames} pictures, found ${pictures} (HEV-2)`);
}

/** NAL units without their start codes; nothing may stand between them (HEV-10, HEV-15). */
function split(bytes, limit, bad) {
  const units = [];
  let start = -1;
  let at = 0;
  while ((at = bytes.indexOf('\0\0', at, 'latin1')) !== -1) {
    const next = bytes[at + 2];
    if (next >= 3) { at += 3; continue; } // payload, or an emulation prevention byte
    const long = next === 0 && bytes[at + 3] === 1;
    if (next !== 1 && !long) throw bad(`bytes that are neither start code nor payload, offset ${at} (HEV-10)`);
    if (start === -1 ? at !== 0 : at === start) throw bad('bytes around NAL units (HEV-10)');
    if (start !== -1) units.push(bytes.subarray(start, at));
    if (units.length >= limit) throw bad(`more than ${limit} NAL units (HEV-15)`);
    at = start = at + (long ? 4 : 3);
  }
  if (start === -1 || start === bytes.length || bytes[bytes.length - 1] === 0) throw bad('no Annex B byte stream (HEV-1, HEV-10)');
  units.push(bytes.subarray(start));
  return units;
}

/** Bits of a NAL unit's payload, behind its header of 2 bytes, without emulation prevention bytes. */
class Bits {
  constructor(unit, bad) {
    this.bad = bad;
    const out = [];
    let zeros = 0;
    const length = Math.min(unit.length, 65_536); // parameter sets and SEI units are much shorter
    for (let i = 2; i < length; i++) {
      if (zeros >= 2 && unit[i] === 3) { zeros = 0; continue; }
      zeros = unit[i] === 0 ? zeros + 1 : 0;
      out.push(unit[i]);
    }
    this.bytes = Buffer.from(out);
    this.at = 0;
  }

  u(count) {
    let value = 0;
    for (let i = 0; i < count; i++, this.at++) {
      if (this.at >= 8 * this.bytes.length) throw this.bad('a parameter set ends too early');
      value = value * 2 + ((this.bytes[this.at >> 3] >> (7 - (this.at & 7))) & 1);
    }
    return value;
  }

  ue() {
    let zeros = 0;
    while (this.u(1) === 0) if (++zeros > 32) throw this.bad('an Exp-Golomb code is too long');
    return 2 ** zeros - 1 + this.u(zeros);
  }

  /** Skip n codes of this kind. */
  skip(n) {
    for (let i = 0; i < n; i++) this.ue();
  }

  /** The stop bit, then zeros to the end. */
  atEnd() {
    if (this.at >= 8 * this.bytes.length || this.u(1) !== 1) return false;
    while (this.at < 8 * this.bytes.length) if (this.u(1) !== 0) return false;
    return true;
  }
}

function checkVps(bits, must) {
  must(bits.u(4) === 0, 'vps_video_parameter_set_id (HEV-4)');
  bits.u(2);
  must(bits.u(6) === 0 && bits.u(3) === 0, 'layers or sub-layers of the VPS (HEV-4)');
  bits.u(17); // nesting flag, 16 reserved bits
  must(bits.u(2) === 0, 'general_profile_space of the VPS (HEV-4)');
  bits.u(1); // tier
  must(bits.u(5) === 4, 'general_profile_idc of the VPS (HEV-4)');
}

function checkSps(bits, layout, must) {
  must(bits.u(4) === 0, 'sps_video_parameter_set_id (HEV-4)');
  must(bits.u(3) === 0, 'sps_max_sub_layers_minus1 (HEV-4)');
  bits.u(1);
  must(bits.u(2) === 0, 'general_profile_space (HEV-4)');
  bits.u(1); // tier
  must(bits.u(5) === 4, 'general_profile_idc (HEV-4)');
  bits.u(40); // compatibility flags and the first constraint flags
  bits.u(48); // the others, level
  must(bits.ue() === 0, 'sps_seq_parameter_set_id (HEV-4)');
  must(bits.ue() === 3, 'chroma_format_idc (HEV-4)');
  must(bits.u(1) === 0, 'separate_colour_plane_flag (HEV-4)');
  const [width, height] = [bits.ue(), bits.ue()];
  must(width === layout.width && height === layout.height,
    `expected ${layout.width} x ${layout.height} samples, found ${width} x ${height} (HEV-2)`);
  must(bits.u(1) === 0, 'conformance_window_flag (HEV-4)');
  must(bits.ue() === 0 && bits.ue() === 0, 'bit depth (HEV-4)');
  const pocBits = bits.ue() + 4;
  must(pocBits <= 16, 'log2_max_pic_order_cnt_lsb_minus4');
  bits.u(1); // sub_layer_ordering_info_present_flag: with one sub-layer the values follow in any case
  must(bits.ue() <= 4, 'sps_max_dec_pic_buffering_minus1 (HEV-4)');
  must(bits.ue() === 0, 'sps_max_num_reorder_pics (HEV-4)');
  bits.ue(); // latency
  bits.skip(6); // block sizes and transform depths
  must(bits.u(1) === 0, 'scaling_list_enabled_flag (HEV-4)');
  bits.u(2); // amp, sao
  must(bits.u(1) === 0, 'pcm_enabled_flag (HEV-4)');
  const sets = bits.ue();
  must(sets <= 64, 'num_short_term_ref_pic_sets');
  for (let i = 0; i < sets; i++) {
    if (i > 0) must(bits.u(1) === 0, 'inter_ref_pic_set_prediction_flag (HEV-12)');
    const negative = bits.ue();
    must(negative <= 1 && bits.ue() === 0, 'num_negative_pics or num_positive_pics (HEV-12)');
    if (negative === 1) {
      bits.ue();
      bits.u(1);
    }
  }
  must(bits.u(1) === 0, 'long_term_ref_pics_present_flag (HEV-4)');
  bits.u(2); // temporal motion vectors, intra smoothing
  if (bits.u(1)) checkVui(bits, must);
  must(bits.u(1) === 0, 'sps_extension_present_flag (HEV-4)');
  must(bits.atEnd(), 'more after the SPS (HEV-10)');
}

function checkVui(bits, must) {
  if (bits.u(1) && bits.u(8) === 255) bits.u(32); // sample aspect ratio
  if (bits.u(1)) bits.u(1); // overscan
  if (bits.u(1)) {
    bits.u(4); // video format and range
    if (bits.u(1)) {
      bits.u(16); // primaries and transfer
      must(bits.u(8) !== 0, 'matrix_coeffs (HEV-11)');
    }
  }
  if (bits.u(1)) bits.skip(2); // chroma sample location
  bits.u(1); // neutral chroma
  must(bits.u(1) === 0, 'field_seq_flag (HEV-12)');
  bits.u(1); // frame_field_info_present_flag
  must(bits.u(1) === 0, 'default_display_window_flag (HEV-12)');
  if (bits.u(1)) {
    bits.u(32); // timing
    bits.u(32);
    if (bits.u(1)) bits.ue();
    must(bits.u(1) === 0, 'vui_hrd_parameters_present_flag (HEV-12)');
  }
  if (bits.u(1)) { // bitstream restriction
    bits.u(3);
    bits.skip(5);
  }
}

function checkPps(bits, must) {
  must(bits.ue() === 0 && bits.ue() === 0, 'parameter set ids of the PPS (HEV-4)');
  bits.u(7); // dependent slices, output flag, extra bits, sign hiding, cabac_init
  bits.skip(3); // reference counts, init_qp (signed codes have the same length)
  bits.u(2); // constrained intra, transform skip
  if (bits.u(1)) bits.ue(); // cu_qp_delta
  bits.skip(2);
  bits.u(3); // chroma offsets in slices, weighted prediction
  must(bits.u(1) === 1, 'transquant_bypass_enabled_flag (HEV-4)');
  must(bits.u(1) === 0, 'tiles_enabled_flag (HEV-4)');
  bits.u(2); // entropy_coding_sync, loop filter across slices
  if (bits.u(1)) { // deblocking
    bits.u(1);
    if (bits.u(1) === 0) bits.skip(2);
  }
  must(bits.u(1) === 0, 'pps_scaling_list_data_present_flag (HEV-4)');
  bits.u(1);
  bits.ue();
  bits.u(1);
  must(bits.u(1) === 0, 'pps_extension_present_flag (HEV-4)');
  must(bits.atEnd(), 'more after the PPS (HEV-10)');
}

/** One message: decoded picture hash, MD5 of three planes; then the stop bit. */
function checkSei(bytes, must) {
  must(bytes.length === 52 && bytes[0] === 132 && bytes[1] === 49 && bytes[2] === 0 && bytes[51] === 0x80,
    'not one decoded picture hash with MD5 (HEV-9)');
}
