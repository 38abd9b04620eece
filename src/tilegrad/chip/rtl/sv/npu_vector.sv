// Vector lanes: one op on 32-bit values a cycle, and the way from sums to narrow elements.

module npu_vector_lane #(
    parameter int FLOATING = 0
) (
    input  logic [7:0]  kind,
    input  logic [5:0]  shift,
    input  logic [31:0] a,
    input  logic [31:0] b,
    output logic [31:0] y
);
  localparam logic [7:0] ADD = 8'd0, SUB = 8'd1, MAX = 8'd2, MIN = 8'd3, MUL = 8'd4, EXP = 8'd5,
      RECIPROCAL = 8'd6;
  generate
    if (FLOATING != 0) begin : g_float
      logic [31:0] total, product;
      logic a_nan, b_nan, both_zero, greater, less;
      npu_fp32_add add (.a(a), .b({b[31] ^ (kind == SUB), b[30:0]}), .y(total));
      npu_fp32_mul mul (.a(a), .b(b), .y(product));
      assign a_nan = a[30:23] == 8'd255 && a[22:0] != 23'd0;
      assign b_nan = b[30:23] == 8'd255 && b[22:0] != 23'd0;
      assign both_zero = a[30:0] == 31'd0 && b[30:0] == 31'd0;
      assign greater = !both_zero
          && (a[31] != b[31] ? b[31] : a[31] ? a[30:0] < b[30:0] : a[30:0] > b[30:0]);
      assign less = !both_zero
          && (a[31] != b[31] ? a[31] : a[31] ? a[30:0] > b[30:0] : a[30:0] < b[30:0]);
      always @* begin
        if (kind == ADD || kind == SUB) y = total;
        else if (kind == MUL) y = product;
        else if (a_nan || b_nan) y = 32'h7fc00000;
        else if (kind == MAX) y = greater ? a : b;
        else y = less ? a : b;
      end
      wire unused = &{1'b0, shift};
    end else begin : g_integer
      logic signed [63:0] product, half, rounded;
      logic signed [63:0] scaled, z;
      logic [63:0] up;
      logic [31:0] low, exp_y, m, reciprocal_y, rsqrt_y;
      logic [4:0] place, n5;
      logic [16:0] n;
      logic [7:0] at;
      logic [17:0] exp_low, exp_high, exp_value;
      logic [25:0] exp_line, reciprocal_line, rsqrt_line;
      logic [17:0] reciprocal_low, reciprocal_high, reciprocal_value;
      logic [17:0] rsqrt_low, rsqrt_high, rsqrt_value;
      logic [8:0] rsqrt_at;
      assign product = $signed({{32{a[31]}}, a}) * $signed({{32{b[31]}}, b});
      assign up = shift == 6'd0 ? 64'd0 : 64'd1 << (shift - 6'd1);
      assign half = product + $signed(up);
      assign rounded = half >>> shift;
      // exp: 2 ** (x log2 e), the whole part a shift and the rest from the table
      assign low = a[31] ? a : 32'd0;
      assign scaled = $signed({{32{low[31]}}, low}) * 64'sd94548;
      assign z = scaled >>> 16;
      assign n = 17'd0 - {z[32:16]};
      assign at = z[15:8];
      npu_table_exp table_low (.index({1'b0, at}), .value(exp_low));
      npu_table_exp table_high (.index({1'b0, at} + 9'd1), .value(exp_high));
      assign exp_line = {8'd0, exp_high - exp_low} * {18'd0, z[7:0]};
      assign exp_value = exp_low + exp_line[25:8];
      assign n5 = n[4:0];
      assign exp_y = n > 17'd31 ? 32'd0 : {14'd0, exp_value} >> n5;
      // the highest 1, and the value with it shifted to bit 30
      always @* begin
        place = 5'd0;
        for (int i = 0; i < 31; i = i + 1) if (a[i]) place = i[4:0];
      end
      assign m = a << (5'd30 - place);
      npu_table_reciprocal reciprocal_0 (.index({1'b0, m[29:22]}), .value(reciprocal_low));
      npu_table_reciprocal reciprocal_1 (
          .index({1'b0, m[29:22]} + 9'd1), .value(reciprocal_high));
      assign reciprocal_line = {8'd0, reciprocal_low - reciprocal_high} * {18'd0, m[21:14]};
      assign reciprocal_value = reciprocal_low - reciprocal_line[25:8];
      assign reciprocal_y = place <= 5'd14 ? {14'd0, reciprocal_value} << (5'd14 - place)
          : {14'd0, reciprocal_value} >> (place - 5'd14);
      assign rsqrt_at = (place[0] ? 9'd129 : 9'd0) + {2'd0, m[29:23]};
      npu_table_rsqrt rsqrt_0 (.index(rsqrt_at), .value(rsqrt_low));
      npu_table_rsqrt rsqrt_1 (.index(rsqrt_at + 9'd1), .value(rsqrt_high));
      assign rsqrt_line = {8'd0, rsqrt_low - rsqrt_high} * {18'd0, m[22:15]};
      assign rsqrt_value = rsqrt_low - rsqrt_line[25:8];
      assign rsqrt_y = place[4:1] <= 4'd8 ? {14'd0, rsqrt_value} << (4'd8 - place[4:1])
          : {14'd0, rsqrt_value} >> (place[4:1] - 4'd8);
      always @* begin
        if (kind == ADD) y = a + b;
        else if (kind == SUB) y = a - b;
        else if (kind == MAX) y = $signed(a) > $signed(b) ? a : b;
        else if (kind == MIN) y = $signed(a) < $signed(b) ? a : b;
        else if (kind == MUL) y = rounded[31:0];
        else if (kind == EXP) y = exp_y;
        else if (a[31] || a == 32'd0) y = 32'h7fffffff;
        else if (kind == RECIPROCAL) y = reciprocal_y;
        else y = rsqrt_y;
      end
      wire unused = &{1'b0, rounded[63:32], z[63:33], exp_line[7:0], reciprocal_line[7:0],
          rsqrt_line[7:0], m[31:30], m[13:0]};
    end
  endgenerate
endmodule

// A sum as it is stored: int8 of int32 by a scale and a shift, bf16 or fp16 of fp32.
module npu_narrow #(
    parameter int ELEMENT  = 8,
    parameter int FLOATING = 0
) (
    input  logic [31:0]        x,
    input  logic [15:0]        scale,
    input  logic [5:0]         shift,
    input  logic               relu,
    input  logic               chance,  // round up by the random bits, not at a half
    input  logic [31:0]        bits,
    output logic [ELEMENT-1:0] y
);
  generate
    if (FLOATING == 5) begin : g_fp16
      logic [31:0] clipped, up, moved;
      logic nan;
      logic [14:0] found;
      assign nan = x[30:23] == 8'd255 && x[22:0] != 23'd0;
      assign clipped = relu && x[31] && !nan ? 32'd0 : x;
      assign up = chance ? {19'd0, bits[12:0]} : 32'hfff + {31'd0, clipped[13]};
      assign moved = (({1'b0, clipped[30:0]} + up) >> 13) - 32'd114688;  // 112 of the exponent
      always @* begin
        if (nan) found = 15'h7e00;
        else if (clipped[30:23] < 8'd113) found = 15'd0;
        else if (moved > 32'h7c00) found = 15'h7c00;
        else found = moved[14:0];
      end
      assign y = {clipped[31], found};
      wire unused = &{1'b0, scale, shift, bits[31:13]};
    end else if (FLOATING != 0) begin : g_float
      logic [31:0] clipped, up, moved;
      logic finite;
      assign finite = x[30:23] != 8'd255;
      assign clipped = relu && x[31] && !(x[30:23] == 8'd255 && x[22:0] != 23'd0) ? 32'd0 : x;
      assign up = chance ? {16'd0, bits[15:0]} : 32'h7fff + {31'd0, clipped[16]};
      assign moved = clipped + (finite ? up : 32'd0);
      assign y = moved[31:16];
      wire unused = &{1'b0, scale, shift, bits[31:16], moved[15:0]};
    end else begin : g_integer
      logic signed [63:0] product, total, scaled;
      logic [63:0] mask, up;
      assign product = $signed({{32{x[31]}}, x}) * $signed({{48{scale[15]}}, scale});
      assign mask = (64'd1 << shift) - 64'd1;
      assign up = shift == 6'd0 ? 64'd0
          : chance ? {32'd0, bits} & mask : 64'd1 << (shift - 6'd1);
      assign total = product + $signed(up);
      assign scaled = total >>> shift;
      always @* begin
        if (scaled > 64'sd127) y = 8'd127;
        else if (relu && scaled < 64'sd0) y = 8'd0;
        else if (scaled < -64'sd128) y = 8'h80;
        else y = scaled[7:0];
      end
    end
  endgenerate
endmodule

// Random bits of one lane.
module npu_random #(
    parameter int LANE = 0
) (
    input  logic        clk,
    input  logic        rst,
    input  logic        seed,
    input  logic [31:0] seed_value,
    input  logic        step,
    output logic [31:0] bits
);
  localparam logic [31:0] SPREAD = 32'h9e3779b9 * (LANE + 1);
  logic [31:0] one, two, three;
  assign one = bits ^ (bits << 13);
  assign two = one ^ (one >> 17);
  assign three = two ^ (two << 5);
  always_ff @(posedge clk) begin
    if (rst) bits <= SPREAD | 32'd1;
    else if (seed) bits <= (SPREAD ^ seed_value) | 32'd1;
    else if (step) bits <= three;
  end
endmodule
