// The mesh: multipliers in rows and columns, the skew before them and the deskew behind.

// A multiplication added to a sum. With a 2:4 unit `index` picks one of four inputs. Where weights
// may have half the bits of an element, `mixed` says that `weight` is two of them, each for an input
// of its own: then two products are added, the lower first.
module npu_mac #(
    parameter int ELEMENT  = 8,
    parameter int WEIGHT   = ELEMENT,
    parameter int FLOATING = 0,
    parameter int SPARSE   = 0,
    parameter int LANE     = ELEMENT * (SPARSE != 0 ? 4 : WEIGHT != ELEMENT ? 2 : 1)
) (
    input  logic [LANE-1:0]    inputs,
    input  logic [ELEMENT-1:0] weight,
    input  logic [1:0]         index,
    input  logic               mixed,
    input  logic [31:0]        sum,
    output logic [31:0]        y
);
  logic [ELEMENT-1:0] chosen, picked;
  generate
    if (SPARSE != 0) begin : g_pick
      assign picked = index[1] ? (index[0] ? inputs[3*ELEMENT+:ELEMENT] : inputs[2*ELEMENT+:ELEMENT])
          : (index[0] ? inputs[ELEMENT+:ELEMENT] : inputs[0+:ELEMENT]);
    end else begin : g_all
      assign picked = inputs[ELEMENT-1:0];
      wire unused = &{1'b0, index};
    end
    if (WEIGHT == ELEMENT) begin : g_same
      assign chosen = picked;
      wire unused = &{1'b0, mixed};
    end else begin : g_mixed
      assign chosen = mixed ? inputs[ELEMENT-1:0] : picked;
    end
    if (FLOATING != 0 && WEIGHT == ELEMENT) begin : g_float
      logic [31:0] product;
      npu_half_mul #(.EXPONENT(FLOATING)) mul (.a(chosen), .b(weight), .y(product));
      npu_fp32_add add (.a(sum), .b(product), .y(y));
    end else if (FLOATING != 0) begin : g_floats
      logic [31:0] low, high, first, both;
      logic [ELEMENT-1:0] low_weight, high_weight;
      npu_fp8_half #(.EXPONENT(FLOATING)) wide_low (.x(weight[7:0]), .y(low_weight));
      npu_fp8_half #(.EXPONENT(FLOATING)) wide_high (.x(weight[15:8]), .y(high_weight));
      npu_half_mul #(.EXPONENT(FLOATING)) mul_low (
          .a(chosen), .b(mixed ? low_weight : weight), .y(low));
      npu_half_mul #(.EXPONENT(FLOATING)) mul_high (
          .a(inputs[ELEMENT+:ELEMENT]), .b(high_weight), .y(high));
      npu_fp32_add add_low (.a(sum), .b(low), .y(first));
      npu_fp32_add add_high (.a(first), .b(high), .y(both));
      assign y = mixed ? both : first;
    end else if (WEIGHT != ELEMENT) begin : g_halves
      // Two multipliers of 8 by 4 bits: the low half of an int8 weight has no sign of its own.
      logic signed [12:0] low;
      logic signed [11:0] high;
      logic signed [31:0] scaled;
      logic [7:0] other;
      assign other = mixed ? inputs[15:8] : chosen;
      assign low = $signed({{5{chosen[7]}}, chosen}) * $signed({{9{mixed && weight[3]}}, weight[3:0]});
      assign high = $signed({{4{other[7]}}, other}) * $signed({{8{weight[7]}}, weight[7:4]});
      assign scaled = mixed ? {{20{high[11]}}, high} : {{16{high[11]}}, high, 4'd0};
      assign y = sum + {{19{low[12]}}, low} + scaled;
    end else begin : g_integer
      logic signed [2*ELEMENT-1:0] product;
      assign product = $signed({{ELEMENT{chosen[ELEMENT-1]}}, chosen})
          * $signed({{ELEMENT{weight[ELEMENT-1]}}, weight});
      assign y = sum + {{(32 - 2 * ELEMENT) {product[2*ELEMENT-1]}}, product};
    end
  endgenerate
endmodule

// One multiplier. With SUMS_STAY weights move down and sums stay until they are drained; else the
// weight stays, sums move down, and weights move down a row while `load` is set.
module npu_pe #(
    parameter int ELEMENT   = 8,
    parameter int WEIGHT    = ELEMENT,
    parameter int FLOATING  = 0,
    parameter int SPARSE    = 0,
    parameter int SUMS_STAY = 0,
    parameter int LANE      = ELEMENT * (SPARSE != 0 ? 4 : WEIGHT != ELEMENT ? 2 : 1)
) (
    input  logic               clk,
    input  logic               rst,
    input  logic               load,
    input  logic               clear,
    input  logic               drain,
    input  logic               mixed,
    input  logic [LANE-1:0]    left,
    input  logic [ELEMENT-1:0] above,
    input  logic [1:0]         above_index,
    input  logic [31:0]        above_sum,
    output logic [LANE-1:0]    inputs,
    output logic [ELEMENT-1:0] still,
    output logic [1:0]         index,
    output logic [31:0]        sum
);
  logic [31:0] total;
  generate
    if (SUMS_STAY != 0) begin : g_sums
      npu_mac #(
          .ELEMENT(ELEMENT), .WEIGHT(WEIGHT), .FLOATING(FLOATING), .SPARSE(SPARSE)
      ) mac (
          .inputs(left), .weight(above), .index(above_index), .mixed(mixed), .sum(sum), .y(total));
      always_ff @(posedge clk) begin
        if (rst || clear) sum <= 32'd0;
        else if (drain) sum <= above_sum;
        else sum <= total;
        still <= rst ? {ELEMENT{1'b0}} : above;
        index <= rst ? 2'd0 : above_index;
      end
      wire unused = &{1'b0, load};
    end else begin : g_still
      npu_mac #(
          .ELEMENT(ELEMENT), .WEIGHT(WEIGHT), .FLOATING(FLOATING), .SPARSE(SPARSE)
      ) mac (
          .inputs(left), .weight(still), .index(index), .mixed(mixed), .sum(above_sum), .y(total));
      always_ff @(posedge clk) begin
        sum <= rst ? 32'd0 : total;
        if (rst) begin
          still <= {ELEMENT{1'b0}};
          index <= 2'd0;
        end else if (load) begin
          still <= above;
          index <= above_index;
        end
      end
      wire unused = &{1'b0, clear, drain};
    end
  endgenerate
  always_ff @(posedge clk) inputs <= rst ? {LANE{1'b0}} : left;
endmodule

// Lanes that leave later than they came: lane i by i cycles, or by LANES - 1 - i.
module npu_skew #(
    parameter int LANES   = 4,
    parameter int WIDTH   = 8,
    parameter int REVERSE = 0
) (
    input  logic                   clk,
    input  logic                   rst,
    input  logic [LANES*WIDTH-1:0] x,
    output wire  [LANES*WIDTH-1:0] y
);
  genvar i;
  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_lane
      localparam int DELAY = REVERSE != 0 ? LANES - 1 - i : i;
      if (DELAY == 0) begin : g_none
        assign y[i*WIDTH+:WIDTH] = x[i*WIDTH+:WIDTH];
      end else begin : g_delay
        logic [DELAY*WIDTH-1:0] line;
        if (DELAY == 1) begin : g_one
          always_ff @(posedge clk) line <= rst ? {WIDTH{1'b0}} : x[i*WIDTH+:WIDTH];
        end else begin : g_more
          always_ff @(posedge clk)
            line <= rst ? {(DELAY * WIDTH) {1'b0}} : {line[(DELAY-1)*WIDTH-1:0], x[i*WIDTH+:WIDTH]};
        end
        assign y[i*WIDTH+:WIDTH] = line[(DELAY-1)*WIDTH+:WIDTH];
      end
    end
  endgenerate
endmodule

// All multipliers. `left` and `top` come before the skew; `bottom` is the row that leaves.
module npu_mesh #(
    parameter int ROWS      = 4,
    parameter int COLUMNS   = 4,
    parameter int ELEMENT   = 8,
    parameter int WEIGHT    = ELEMENT,
    parameter int FLOATING  = 0,
    parameter int SPARSE    = 0,
    parameter int SUMS_STAY = 0,
    parameter int LANE      = ELEMENT * (SPARSE != 0 ? 4 : WEIGHT != ELEMENT ? 2 : 1)
) (
    input  logic                       clk,
    input  logic                       rst,
    input  logic                       load,
    input  logic                       clear,
    input  logic                       drain,
    input  logic                       mixed,
    input  logic [ROWS*LANE-1:0]       left,
    input  logic [COLUMNS*ELEMENT-1:0] top,
    input  logic [COLUMNS*2-1:0]       top_index,
    output wire  [COLUMNS*32-1:0]      bottom
);
  wire [ROWS*COLUMNS*LANE-1:0] inputs;  // registers of all multipliers, row by row
  wire [ROWS*COLUMNS*ELEMENT-1:0] still;
  wire [ROWS*COLUMNS*2-1:0] index;
  wire [ROWS*COLUMNS*32-1:0] sums;
  wire [ROWS*LANE-1:0] edge_left;
  wire [COLUMNS*ELEMENT-1:0] edge_top;
  wire [COLUMNS*2-1:0] edge_index;
  npu_skew #(.LANES(ROWS), .WIDTH(LANE)) skew_left (.clk(clk), .rst(rst), .x(left), .y(edge_left));
  generate
    if (SUMS_STAY != 0) begin : g_top
      npu_skew #(.LANES(COLUMNS), .WIDTH(ELEMENT)) skew_top (
          .clk(clk), .rst(rst), .x(top), .y(edge_top));
      npu_skew #(.LANES(COLUMNS), .WIDTH(2)) skew_index (
          .clk(clk), .rst(rst), .x(top_index), .y(edge_index));
      assign bottom = sums[(ROWS-1)*COLUMNS*32+:COLUMNS*32];
    end else begin : g_bottom
      assign edge_top = top;
      assign edge_index = top_index;
      npu_skew #(.LANES(COLUMNS), .WIDTH(32), .REVERSE(1)) deskew (
          .clk(clk), .rst(rst), .x(sums[(ROWS-1)*COLUMNS*32+:COLUMNS*32]), .y(bottom));
    end
  endgenerate
  wire unused = &{1'b0, inputs, still, index};  // the last column and row pass nothing on
  genvar r, c;
  generate
    for (r = 0; r < ROWS; r = r + 1) begin : g_row
      for (c = 0; c < COLUMNS; c = c + 1) begin : g_column
        localparam int AT = r * COLUMNS + c;
        logic [LANE-1:0] from_left;
        logic [ELEMENT-1:0] from_top;
        logic [1:0] from_index;
        logic [31:0] from_sum;
        if (c == 0) begin : g_edge_left
          assign from_left = edge_left[r*LANE+:LANE];
        end else begin : g_left
          assign from_left = inputs[(AT-1)*LANE+:LANE];
        end
        if (r == 0) begin : g_edge_top
          assign from_top = edge_top[c*ELEMENT+:ELEMENT];
          assign from_index = edge_index[c*2+:2];
          assign from_sum = 32'd0;
        end else begin : g_above
          assign from_top = still[(AT-COLUMNS)*ELEMENT+:ELEMENT];
          assign from_index = index[(AT-COLUMNS)*2+:2];
          assign from_sum = sums[(AT-COLUMNS)*32+:32];
        end
        npu_pe #(
            .ELEMENT(ELEMENT), .WEIGHT(WEIGHT), .FLOATING(FLOATING), .SPARSE(SPARSE),
            .SUMS_STAY(SUMS_STAY)
        ) pe (
            .clk(clk), .rst(rst), .load(load), .clear(clear), .drain(drain), .mixed(mixed),
            .left(from_left), .above(from_top), .above_index(from_index), .above_sum(from_sum),
            .inputs(inputs[AT*LANE+:LANE]), .still(still[AT*ELEMENT+:ELEMENT]),
            .index(index[AT*2+:2]), .sum(sums[AT*32+:32]));
      end
    end
  endgenerate
endmodule
