// Load and store: rows between DRAM, behind an AXI4 port, and the memories on the chip.

// Beats of the next burst: to the end of the row or of 4096 bytes, at most 256.
module npu_burst #(
    parameter int DMA = 4
) (
    input  logic [31:0] address,
    input  logic [31:0] left,
    output logic [31:0] beats
);
  localparam int SHIFT = $clog2(DMA);
  logic [31:0] bound, first;
  assign bound = (32'd4096 - {20'd0, address[11:0]}) >> SHIFT;
  assign first = left < bound ? left : bound;
  assign beats = first < 32'd256 ? first : 32'd256;
  wire unused = &{1'b0, address[31:12]};
endmodule

// Slots of a scratchpad row from the bytes of a row in DRAM; those behind its columns are 0.
module npu_unpack #(
    parameter int SLOTS    = 4,
    parameter int ELEMENT  = 8,
    parameter int WEIGHT   = 8,
    parameter int FLOATING = 0,
    parameter int SPARSE   = 0,
    parameter int SLOT     = ELEMENT + (SPARSE != 0 ? 2 : 0),
    parameter int WIDTH    = 32
) (
    input  logic [WIDTH-1:0]      data,
    input  logic [31:0]           columns,
    input  logic                  narrow,
    input  logic                  indexed,
    input  logic [31:0]           element_bytes,  // of the row, before its indices
    output wire  [SLOTS*SLOT-1:0] row
);
  wire unused_tail = &{1'b0, data};  // the last beat may be wider than the row
  genvar i;
  generate
    for (i = 0; i < SLOTS; i = i + 1) begin : g_slot
      logic [ELEMENT-1:0] wide, bits;
      logic there;
      assign there = columns > i;
      if (WEIGHT == ELEMENT) begin : g_same
        assign wide = data[i*ELEMENT+:ELEMENT];
      end else if (WEIGHT == 4) begin : g_int4
        assign wide = {{4{data[i*4+3]}}, data[i*4+:4]};
      end else begin : g_fp8
        npu_fp8_half #(.EXPONENT(FLOATING)) widen (.x(data[i*8+:8]), .y(wide));
      end
      assign bits = narrow ? wide : data[i*ELEMENT+:ELEMENT];
      if (SPARSE != 0) begin : g_index
        logic [WIDTH-1:0] tail;
        assign tail = data >> ({element_bytes[28:0], 3'd0} + 32'd2 * i);
        assign row[i*SLOT+:SLOT] = there ? {indexed ? tail[1:0] : 2'd0, bits} : {SLOT{1'b0}};
        wire unused = &{1'b0, tail[WIDTH-1:2], element_bytes[31:29]};
      end else begin : g_plain
        assign row[i*SLOT+:SLOT] = there ? bits : {SLOT{1'b0}};
      end
    end
    if (SPARSE == 0) begin : g_no_index
      wire unused = &{1'b0, indexed, element_bytes};
    end
  endgenerate
endmodule

module npu_load #(
    parameter int SLOTS    = 4,
    parameter int ELEMENT  = 8,
    parameter int WEIGHT   = 8,
    parameter int FLOATING = 0,
    parameter int SPARSE   = 0,
    parameter int DMA      = 4,
    parameter int ROW      = 7,
    parameter int SLOT     = ELEMENT + (SPARSE != 0 ? 2 : 0)
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  begins,
    input  logic                  runs,
    input  logic [127:0]          head,
    input  logic [127:0]          word,
    output logic                  done,
    output logic                  arvalid,
    input  logic                  arready,
    output logic [31:0]           araddr,
    output logic [7:0]            arlen,
    input  logic                  rvalid,
    output logic                  rready,
    input  logic [DMA*8-1:0]      rdata,
    output logic                  write,
    output logic [ROW-1:0]        write_row,
    output wire  [SLOTS*SLOT-1:0] d
);
  localparam int SHIFT = $clog2(DMA);
  localparam int BYTES = SLOTS * ELEMENT / 8 + (SPARSE != 0 ? (SLOTS * 2 + 7) / 8 : 0);
  localparam int BEATS = (BYTES + DMA - 1) / DMA;

  function automatic [31:0] elements(input [15:0] columns, input narrow);
    elements = ({16'd0, columns} * (narrow ? WEIGHT : ELEMENT) + 32'd7) >> 3;
  endfunction
  function automatic [31:0] row_beats(input [15:0] columns, input narrow, input indexed);
    row_beats = (elements(columns, narrow) + (DMA - 1)
        + (indexed ? ({16'd0, columns} * 2 + 32'd7) >> 3 : 32'd0)) >> SHIFT;
  endfunction

  logic [BEATS*DMA*8-1:0] buffer;
  logic [31:0] row_address, left, rows_left, beats, row, beat, next_row_address;
  logic [31:0] words_beats;
  logic row_asked;
  npu_burst #(.DMA(DMA)) burst (.address(araddr), .left(left), .beats(beats));
  wire [31:0] beats_less = beats - 32'd1;
  assign arlen = beats_less[7:0];
  assign words_beats = row_beats(word[63:48], word[12], word[13]);
  assign row_asked = left == beats;
  assign next_row_address = row_address + word[95:64];
  assign rready = runs;
  assign done = write && row == {16'd0, word[47:32]};

  always_ff @(posedge clk) begin
    if (rst) arvalid <= 1'b0;
    else if (begins) begin
      arvalid <= 1'b1;
      araddr <= head[127:96];
      row_address <= head[127:96];
      left <= row_beats(head[63:48], head[12], head[13]);
      rows_left <= {16'd0, head[47:32]};
    end else if (arvalid && arready) begin
      if (row_asked) begin
        arvalid <= rows_left != 32'd1;
        rows_left <= rows_left - 32'd1;
        row_address <= next_row_address;
        araddr <= next_row_address;
        left <= words_beats;
      end else begin
        araddr <= araddr + (beats << SHIFT);
        left <= left - beats;
      end
    end
  end

  logic [31:0] local_row;
  assign local_row = {16'd0, word[31:16]} + row;
  always_ff @(posedge clk) begin
    if (rst || begins) begin
      row <= 32'd0;
      beat <= 32'd0;
      write <= 1'b0;
    end else if (runs && rvalid) begin
      buffer[beat*DMA*8+:DMA*8] <= rdata;
      if (beat + 32'd1 == words_beats) begin
        beat <= 32'd0;
        write <= 1'b1;
        write_row <= local_row[ROW-1:0];
        row <= row + 32'd1;
      end else begin
        beat <= beat + 32'd1;
        write <= 1'b0;
      end
    end else write <= 1'b0;
  end

  npu_unpack #(
      .SLOTS(SLOTS), .ELEMENT(ELEMENT), .WEIGHT(WEIGHT), .FLOATING(FLOATING), .SPARSE(SPARSE),
      .WIDTH(BEATS * DMA * 8)
  ) unpack (
      .data(buffer), .columns({16'd0, word[63:48]}), .narrow(word[12]), .indexed(word[13]),
      .element_bytes(elements(word[63:48], word[12])), .row(d));
  wire unused = &{1'b0, word[15:14], word[11:0], word[127:96], beats_less[31:8],
      local_row[31:ROW], head[11:0], head[31:14], head[95:64]};
`ifdef FORMAL
  npu_axi_held #(.WIDTH(40)) held_read (
      .clk(clk), .rst(rst), .valid(arvalid), .ready(arready), .shown({araddr, arlen}));
`endif
endmodule

module npu_store #(
    parameter int COLUMNS    = 4,
    parameter int ELEMENT    = 8,
    parameter int FLOATING   = 0,
    parameter int STOCHASTIC = 0,
    parameter int LANES      = 2,
    parameter int DMA        = 4,
    parameter int ROW        = 5
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  begins,
    input  logic                  runs,
    input  logic [127:0]          head,
    input  logic [127:0]          word,
    output logic                  done,
    input  logic                  seed,
    input  logic [31:0]           seed_value,
    output logic                  read,
    output logic [ROW-1:0]        read_row,
    input  logic [COLUMNS*32-1:0] q,
    output logic                  awvalid,
    input  logic                  awready,
    output logic [31:0]           awaddr,
    output logic [7:0]            awlen,
    output logic                  wvalid,
    input  logic                  wready,
    output logic [DMA*8-1:0]      wdata,
    output wire  [DMA-1:0]        wstrb,
    output logic                  wlast,
    input  logic                  bvalid,
    output logic                  bready
);
  localparam logic [2:0] READ = 3'd0, LATCH = 3'd1, NARROW = 3'd2, ADDRESS = 3'd3, BEATS = 3'd4,
      ANSWERS = 3'd5;
  localparam int SHIFT = $clog2(DMA);
  localparam int SIZE = (COLUMNS * 4 + DMA - 1) / DMA;
  logic [2:0] phase;
  logic [31:0] row, lane, beat, left, sent, open, beats, row_address, row_bytes, bytes_left;
  logic [COLUMNS*32-1:0] latched;
  logic [SIZE*DMA*8-1:0] buffer;
  wire [LANES*ELEMENT-1:0] narrow;
  logic [LANES*32-1:0] part;
  logic raw, last_lane, opened;
  assign raw = word[12];
  assign row_bytes = raw ? {20'd0, word[57:48], 2'd0} : {22'd0, word[57:48]} * (ELEMENT / 8);
  npu_burst #(.DMA(DMA)) burst (.address(awaddr), .left(left), .beats(beats));
  wire [31:0] beats_less = beats - 32'd1;
  assign awlen = beats_less[7:0];
  assign awvalid = runs && phase == ADDRESS;
  assign wvalid = runs && phase == BEATS;
  assign wdata = buffer[beat*DMA*8+:DMA*8];
  assign wlast = sent == 32'd1;
  assign bytes_left = row_bytes - (beat << SHIFT);
  assign bready = 1'b1;
  assign read = runs && phase == READ;
  logic [31:0] sum_row;
  assign sum_row = {16'd0, word[31:16]} + row;
  assign read_row = sum_row[ROW-1:0];
  assign done = phase == ANSWERS && open == 32'd0;
  assign part = latched[lane*32+:LANES*32];
  assign last_lane = lane + LANES == COLUMNS;
  assign opened = awvalid && awready;

  genvar i;
  generate
    for (i = 0; i < DMA; i = i + 1) begin : g_strobe
      assign wstrb[i] = bytes_left > i;
    end
    for (i = 0; i < LANES; i = i + 1) begin : g_lane
      logic [31:0] bits;
      if (STOCHASTIC != 0) begin : g_random
        npu_random #(.LANE(i)) random_bits (
            .clk(clk), .rst(rst), .seed(seed), .seed_value(seed_value),
            .step(runs && phase == NARROW && word[14]), .bits(bits));
      end else begin : g_none
        assign bits = 32'd0;
      end
      npu_narrow #(.ELEMENT(ELEMENT), .FLOATING(FLOATING)) one (
          .x(part[i*32+:32]), .scale(word[79:64]), .shift(word[63:58]), .relu(word[13]),
          .chance(STOCHASTIC != 0 && word[14]), .bits(bits), .y(narrow[i*ELEMENT+:ELEMENT]));
    end
    if (STOCHASTIC == 0) begin : g_plain
      wire unused = &{1'b0, seed, seed_value};
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (rst || begins) open <= 32'd0;
    else open <= open + {31'd0, opened} - {31'd0, bvalid};
  end

  always_ff @(posedge clk) begin
    if (rst) begin
      phase <= READ;
      buffer <= {(SIZE * DMA * 8) {1'b0}};
    end else if (begins) begin
      phase <= READ;
      row <= 32'd0;
      awaddr <= head[127:96];
      row_address <= head[127:96];
    end else if (runs) begin
      case (phase)
        READ: phase <= LATCH;
        LATCH: begin
          latched <= q;
          lane <= 32'd0;
          phase <= NARROW;
        end
        NARROW: begin
          if (raw) buffer[lane*32+:LANES*32] <= part;
          else buffer[lane*ELEMENT+:LANES*ELEMENT] <= narrow;
          lane <= lane + LANES;
          if (last_lane) begin
            phase <= ADDRESS;
            beat <= 32'd0;
            left <= (row_bytes + (DMA - 1)) >> SHIFT;
          end
        end
        ADDRESS: if (awready) begin
          sent <= beats;
          phase <= BEATS;
        end
        BEATS: if (wready) begin
          beat <= beat + 32'd1;
          left <= left - 32'd1;
          sent <= sent - 32'd1;
          awaddr <= awaddr + DMA;
          if (wlast) begin
            if (left != 32'd1) phase <= ADDRESS;
            else begin
              row <= row + 32'd1;
              row_address <= row_address + {16'd0, word[95:80]};
              awaddr <= row_address + {16'd0, word[95:80]};
              phase <= row + 32'd1 == {16'd0, word[47:32]} ? ANSWERS : READ;
            end
          end
        end
        default: ;
      endcase
    end
  end
  wire unused = &{1'b0, word[15:14], word[11:0], word[127:96], head[95:0], beats_less[31:8],
      sum_row[31:ROW]};
`ifdef FORMAL
  npu_axi_held #(.WIDTH(40)) held_write (
      .clk(clk), .rst(rst), .valid(awvalid), .ready(awready), .shown({awaddr, awlen}));
  npu_axi_held #(.WIDTH(DMA * 9 + 1)) held_beat (
      .clk(clk), .rst(rst), .valid(wvalid), .ready(wready), .shown({wdata, wstrb, wlast}));
`endif
endmodule

`ifdef FORMAL
// AXI: what is shown stays until it is taken.
module npu_axi_held #(
    parameter int WIDTH = 8
) (
    input logic             clk,
    input logic             rst,
    input logic             valid,
    input logic             ready,
    input logic [WIDTH-1:0] shown
);
  logic before_valid;
  logic [WIDTH-1:0] before;
  initial before_valid = 1'b0;
  always_ff @(posedge clk) begin
    before_valid <= valid && !ready && !rst;
    before <= shown;
  end
  always_ff @(posedge clk) if (before_valid && !rst) begin
    a_stays : assert (valid);
    a_same : assert (shown == before);
  end
endmodule
`endif
