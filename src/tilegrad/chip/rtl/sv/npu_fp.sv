// Floats of the mesh and the vector lanes: products of 16-bit floats, fp32 sums and products, all in
// one cycle. EXPONENT tells 16-bit floats by their bits of exponent: 8 of bf16, 5 of fp16.
// Subnormals are zero before and after; there is one NaN. Rounding is to the nearest even.

// The fp32 product of two 16-bit floats; it is exact.
module npu_half_mul #(
    parameter int EXPONENT = 8
) (
    input  logic [15:0] a,
    input  logic [15:0] b,
    output logic [31:0] y
);
  localparam int F = 15 - EXPONENT;  // bits of the fraction
  localparam int P = 2 * F + 2;  // of the product
  localparam int BIAS = (1 << EXPONENT) - 129;  // twice that of the float, less that of fp32
  logic sign, zero, nan, inf, a_top, b_top;
  logic [P-1:0] p;
  logic signed [11:0] e;
  logic [22:0] fraction;
  assign sign = a[15] ^ b[15];
  assign zero = (a[14:F] == {EXPONENT{1'b0}}) || (b[14:F] == {EXPONENT{1'b0}});
  assign a_top = a[14:F] == {EXPONENT{1'b1}};
  assign b_top = b[14:F] == {EXPONENT{1'b1}};
  assign inf = a_top || b_top;
  assign nan = (a_top && a[F-1:0] != {F{1'b0}}) || (b_top && b[F-1:0] != {F{1'b0}})
      || (inf && zero);
  assign p = {{(F + 1) {1'b0}}, 1'b1, a[F-1:0]} * {{(F + 1) {1'b0}}, 1'b1, b[F-1:0]};
  assign e = $signed({{(12 - EXPONENT) {1'b0}}, a[14:F]}) + $signed({{(12 - EXPONENT) {1'b0}}, b[14:F]})
      - BIAS[11:0] + $signed({11'd0, p[P-1]});
  assign fraction = p[P-1] ? {p[P-2:0], {(24 - P) {1'b0}}} : {p[P-3:0], {(25 - P) {1'b0}}};
  always @* begin
    if (nan) y = 32'h7fc00000;
    else if (inf) y = {sign, 8'd255, 23'd0};
    else if (zero || e <= 12'sd0) y = {sign, 31'd0};
    else if (e >= 12'sd255) y = {sign, 8'd255, 23'd0};
    else y = {sign, e[7:0], fraction};
  end
endmodule

// The 16-bit float of an e4m3 byte; it is exact.
module npu_fp8_half #(
    parameter int EXPONENT = 8
) (
    input  logic [7:0]  x,
    output logic [15:0] y
);
  localparam int F = 15 - EXPONENT;
  localparam int LEAST = (1 << (EXPONENT - 1)) - 8;  // the exponent of e4m3's subnormals
  localparam logic [EXPONENT-1:0] BIAS = LEAST[EXPONENT-1:0];
  logic [EXPONENT-1:0] e;
  logic [2:0] m;
  always @* begin
    e = BIAS + {{(EXPONENT - 4) {1'b0}}, x[6:3]};
    m = x[2:0];
    if (x[6:3] == 4'd0) begin
      if (x[2]) {e, m} = {BIAS, x[1:0], 1'b0};
      else if (x[1]) {e, m} = {BIAS - {{(EXPONENT - 1) {1'b0}}, 1'b1}, x[0], 2'd0};
      else if (x[0]) {e, m} = {BIAS - {{(EXPONENT - 2) {1'b0}}, 2'd2}, 3'd0};
      else {e, m} = {(EXPONENT + 3) {1'b0}};
    end
    y = x[6:0] == 7'h7f ? {1'b0, {EXPONENT{1'b1}}, 1'b1, {(F - 1) {1'b0}}}
        : {x[7], e, m, {(F - 3) {1'b0}}};
  end
endmodule

// A 16-bit float from outside: subnormals to zero, NaNs to the one.
module npu_half_clean #(
    parameter int EXPONENT = 8
) (
    input  logic [15:0] x,
    output logic [15:0] y
);
  localparam int F = 15 - EXPONENT;
  assign y = x[14:F] == {EXPONENT{1'b0}} ? {x[15], 15'd0}
      : (x[14:F] == {EXPONENT{1'b1}} && x[F-1:0] != {F{1'b0}})
      ? {1'b0, {EXPONENT{1'b1}}, 1'b1, {(F - 1) {1'b0}}} : x;
endmodule

// The fp32 number of a 16-bit float that is clean.
module npu_half_wide #(
    parameter int EXPONENT = 8
) (
    input  logic [15:0] x,
    output logic [31:0] y
);
  generate
    if (EXPONENT == 8) begin : g_bf16
      assign y = {x, 16'd0};
    end else begin : g_fp16
      assign y = {x[15], x[14:10] == 5'd0 ? 8'd0 : x[14:10] == 5'd31 ? 8'd255 : {3'd0, x[14:10]} + 8'd112,
          x[9:0], 13'd0};
    end
  endgenerate
endmodule

// The fp32 sum.
module npu_fp32_add (
    input  logic [31:0] a,
    input  logic [31:0] b,
    output logic [31:0] y
);
  logic swap, nan, inf, x_zero, y_zero;
  logic [31:0] larger, lesser;
  logic [7:0] distance;
  logic [26:0] mx, my, moved, aligned, normal;
  logic [27:0] total;
  logic sticky, up;
  logic [4:0] zeros;
  logic signed [9:0] e, rounded_e;
  logic [24:0] rounded;
  assign swap = b[30:0] > a[30:0];
  assign larger = swap ? b : a;
  assign lesser = swap ? a : b;
  assign nan = (a[30:23] == 8'd255 && a[22:0] != 23'd0) || (b[30:23] == 8'd255 && b[22:0] != 23'd0)
      || (a[30:23] == 8'd255 && b[30:23] == 8'd255 && a[31] != b[31]);
  assign inf = larger[30:23] == 8'd255;
  assign x_zero = larger[30:23] == 8'd0;
  assign y_zero = lesser[30:23] == 8'd0;
  assign mx = x_zero ? 27'd0 : {1'b1, larger[22:0], 3'd0};
  assign my = y_zero ? 27'd0 : {1'b1, lesser[22:0], 3'd0};
  assign distance = larger[30:23] - lesser[30:23];
  assign moved = distance > 8'd26 ? 27'd0 : my >> distance;
  assign sticky = distance > 8'd26 ? my != 27'd0 : (moved << distance) != my;
  assign aligned = {moved[26:1], moved[0] | sticky};
  assign total = larger[31] == lesser[31] ? {1'b0, mx} + {1'b0, aligned} : {1'b0, mx} - {1'b0, aligned};
  always @* begin
    zeros = 5'd27;
    for (int i = 0; i < 27; i = i + 1) if (total[i]) zeros = 5'd26 - i[4:0];
  end
  assign normal = total[27] ? {total[27:2], total[1] | total[0]} : total[26:0] << zeros;
  assign e = $signed({2'd0, larger[30:23]})
      + (total[27] ? 10'sd1 : -$signed({5'd0, zeros}));
  assign up = normal[2] & (normal[1] | normal[0] | normal[3]);
  assign rounded = {1'b0, normal[26:3]} + {24'd0, up};
  assign rounded_e = e + $signed({9'd0, rounded[24]});
  wire unused = &{1'b0, rounded[23]};
  always @* begin
    if (nan) y = 32'h7fc00000;
    else if (inf) y = {larger[31], 8'd255, 23'd0};
    else if (x_zero) y = {larger[31] & lesser[31], 31'd0};
    else if (total == 28'd0) y = 32'd0;
    else if (e <= 10'sd0) y = {larger[31], 31'd0};
    else if (rounded_e >= 10'sd255) y = {larger[31], 8'd255, 23'd0};
    else y = {larger[31], rounded_e[7:0], rounded[22:0]};
  end
endmodule

// The fp32 product; what is below the smallest normal number before rounding is zero.
module npu_fp32_mul (
    input  logic [31:0] a,
    input  logic [31:0] b,
    output logic [31:0] y
);
  logic sign, zero, nan, inf, up;
  logic [47:0] p;
  logic [24:0] kept, rounded;
  logic signed [11:0] e, rounded_e;
  assign sign = a[31] ^ b[31];
  assign zero = (a[30:23] == 8'd0) || (b[30:23] == 8'd0);
  assign inf = (a[30:23] == 8'd255) || (b[30:23] == 8'd255);
  assign nan = (a[30:23] == 8'd255 && a[22:0] != 23'd0) || (b[30:23] == 8'd255 && b[22:0] != 23'd0)
      || (inf && zero);
  assign p = {24'd0, 1'b1, a[22:0]} * {24'd0, 1'b1, b[22:0]};
  assign e = $signed({4'd0, a[30:23]}) + $signed({4'd0, b[30:23]}) - 12'sd127
      + $signed({11'd0, p[47]});
  assign kept = p[47] ? {1'b0, p[47:24]} : {1'b0, p[46:23]};
  assign up = p[47] ? p[23] & (p[24] | (p[22:0] != 23'd0)) : p[22] & (p[23] | (p[21:0] != 22'd0));
  assign rounded = kept + {24'd0, up};
  assign rounded_e = e + $signed({11'd0, rounded[24]});
  wire unused = &{1'b0, rounded[23]};
  always @* begin
    if (nan) y = 32'h7fc00000;
    else if (inf) y = {sign, 8'd255, 23'd0};
    else if (zero || e <= 12'sd0) y = {sign, 31'd0};
    else if (rounded_e >= 12'sd255) y = {sign, 8'd255, 23'd0};
    else y = {sign, rounded_e[7:0], rounded[22:0]};
  end
endmodule

// fp32 bits from outside: subnormals to zero, NaNs to the one.
module npu_fp32_clean (
    input  logic [31:0] x,
    output logic [31:0] y
);
  assign y = x[30:23] == 8'd0 ? {x[31], 31'd0}
      : (x[30:23] == 8'd255 && x[22:0] != 23'd0) ? 32'h7fc00000 : x;
endmodule

// The sum of two 32-bit values of the chip: integers wrap.
module npu_add #(
    parameter int FLOATING = 0
) (
    input  logic [31:0] a,
    input  logic [31:0] b,
    output logic [31:0] y
);
  generate
    if (FLOATING != 0) begin : g_float
      npu_fp32_add add (.a(a), .b(b), .y(y));
    end else begin : g_integer
      assign y = a + b;
    end
  endgenerate
endmodule
